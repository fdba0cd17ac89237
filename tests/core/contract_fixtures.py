"""Fixtures of the contract's tests: parts for ``Hooks``, and distributions for one test."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from command_line import distribution_of

import geartrain.planning.lazy_exports
import geartrain.planning.registry
import geartrain.planning.selection
from geartrain import hookimpl
from geartrain.builtin.defaults import Defaults
from geartrain.hooks.manager import Hooks
from geartrain.hooks.plugin_info import LoadedPlugin, PluginInfo

GROUPS = ("accelerators", "strategies", "plugins")


#: The attributes of a run that core's collectives read: the world of one rank.
ALONE = SimpleNamespace(world=SimpleNamespace(size=1))


def part(plugin, kind="plugin", name=None, distribution=None):
    """Return a part as the registry does; its label is ``name``, or ``distribution[name]``."""
    name = name or getattr(plugin, "__name__", type(plugin).__name__)
    return LoadedPlugin(
        PluginInfo(name, kind, distribution, "1.0" if distribution else None, "in a test"), plugin
    )


def defaults():
    return part(Defaults(), "default", "defaults", "geartrain")


def strategy(plugin, name="strat"):
    return part(plugin, "strategy", name, "geartrain-strat")


def accelerator(plugin, name="chip"):
    return part(plugin, "accelerator", name, "geartrain-chip")


def hooks_of(*parts):
    """Return hooks of core's defaults and these parts; other objects become plugins."""
    return Hooks([defaults(), *(p if isinstance(p, LoadedPlugin) else part(p) for p in parts)])


def owns(result, hook="all_gather"):
    """Return an object whose plain hookimpl of ``hook`` returns ``result``."""

    @hookimpl
    def function(self):
        return result

    return type(f"Owns{hook.title()}", (), {hook: function})()


def gather(hooks):
    return hooks.all_gather(run=ALONE, tensor=[1])


class Doubles:
    @hookimpl(wrapper=True)
    def all_gather(self):
        return (yield) * 2


def specs(**functions):
    """Return a module of hookspecs."""
    module = ModuleType("specs")
    vars(module).update(functions)
    return module


def accelerator_source(cls="Chip", priority=10, unavailable=None, count=4):
    return f"""
class {cls}:
    priority = {priority}
    def __init__(self, pinned: bool = False):
        self.pinned = pinned
    @staticmethod
    def unavailable():
        return {unavailable!r}
    @staticmethod
    def device_count():
        return {count}
"""


def strategy_source(cls="Strategy", layout="Layout(len(request.devices), 1)"):
    return f"""
from geartrain import Layout, hookimpl
class {cls}:
    def __init__(self, bucket_mb: int = 25):
        self.bucket_mb = bucket_mb
    @hookimpl
    def plan_processes(self, request):
        return {layout}
"""


class Dists:
    """Distributions for one test: real ``*.dist-info`` folders and modules on ``sys.path``."""

    def __init__(self, folder, monkeypatch):
        self._folder, self._monkeypatch = folder, monkeypatch
        self.names = {"geartrain"}

    def add(self, distribution, source="", *, version="1.0", requires=(), **groups):
        """Install a distribution with one module.

        Args:
            requires: its ``Requires-Dist`` lines.
            groups: ``accelerators``, ``strategies``, ``plugins`` or ``implied``: name of the entry
                point -> text after ``module:``, or the whole value if it begins with ``=``.

        Returns:
            The module's name.
        """
        module = "fake_" + distribution.replace(
            "-", "_"
        )  # never the name of a real plugin, which may be loaded
        home = self._folder / distribution
        info = home / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        needs = "".join(f"Requires-Dist: {line}\n" for line in requires)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n{needs}"
        )
        lines = []
        for group in (*GROUPS, "contract", "implied"):
            entries = groups.get(group, {})
            lines += [
                f"[geartrain.{group}]",
                *(f"{name} = {_value(module, value)}" for name, value in entries.items()),
            ]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        (home / f"{module}.py").write_text(source)
        self._monkeypatch.syspath_prepend(home)
        self.names.add(distribution.replace("_", "-"))
        return module

    def accelerator(self, name, **facts):
        """Install ``geartrain-<name>``, an accelerator of that name."""
        return self.add(
            f"geartrain-{name}",
            accelerator_source(**facts),
            accelerators={name: facts.get("cls", "Chip")},
        )

    def strategy(self, name, **facts):
        """Install ``geartrain-<name>``, a strategy of that name."""
        return self.add(
            f"geartrain-{name}",
            strategy_source(**facts),
            strategies={name: facts.get("cls", "Strategy")},
        )


def _value(module, value):
    return value[1:].strip() if value.startswith("=") else f"{module}:{value}"


@pytest.fixture
def dists(tmp_path, monkeypatch):
    """Hide all installed distributions but core; the test may add others."""
    made = Dists(tmp_path / "site", monkeypatch)
    for module in (geartrain.planning.registry, geartrain.planning.lazy_exports):
        real = module.entry_points

        def only_ours(real=real, **wanted):
            return [ep for ep in real(**wanted) if ep.dist and distribution_of(ep) in made.names]

        monkeypatch.setattr(module, "entry_points", only_ours)
    monkeypatch.delenv("GEARTRAIN_BLOCK", raising=False)
    monkeypatch.setattr(geartrain.planning.registry, "visible_devices", dict)
    # Ranks may be started as if pytest's command could be run again.
    monkeypatch.setattr("geartrain_parallel.rerun_command.reason_not_rerunnable", lambda: None)
    before = set(sys.modules)
    yield made
    for name in set(sys.modules) - before:
        if _lies_in(sys.modules[name], tmp_path):
            del sys.modules[name]


def _lies_in(module, folder: Path):
    file = getattr(module, "__file__", None)
    return file is not None and folder in Path(file).parents
