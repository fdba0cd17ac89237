"""Setup: the parts of a run, core's own and the selected plugins, and their plan."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from geartrain._version import __version__
from geartrain.builtin.defaults import Defaults
from geartrain.builtin.run_folder import LastCheckpoint, RunFolder
from geartrain.errors import UsageError, warn
from geartrain.errors.distributions import import_from
from geartrain.errors.known import KNOWN
from geartrain.files.paths import user_path
from geartrain.hooks.manager import Hooks
from geartrain.hooks.plugin_info import LoadedPlugin, PluginInfo
from geartrain.hooks.spelling import warn_of_others
from geartrain.launch.cluster import ClusterEnvironment, detect
from geartrain.module.module import overridden
from geartrain.options import Options
from geartrain.plan import Plan, check_joins, make_plan
from geartrain.planning.registry import Registry, make
from geartrain.planning.selection import select_devices, select_precision, select_strategy


@dataclass(frozen=True, slots=True)
class _Choices:
    """The arguments of a Trainer or a Session that choose its parts."""

    accelerator: Any = "auto"
    devices: Any = "auto"
    strategy: Any = "auto"
    num_nodes: int = 1
    precision: Any = "32-true"
    plugins: Any = ()
    callbacks: Any = ()
    block: Sequence[str] = ()
    max_time: Any = None
    max_restarts: int = 0
    output: str | Path | None = None
    accelerator_options: Mapping[str, Any] | None = None
    strategy_options: Mapping[str, Any] | None = None
    plugin_options: Mapping[str, Mapping[str, Any]] | None = None
    assume: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Setup:
    """What a Trainer or a Session consists of before anything starts.

    It travels to other processes. There it has the same plan and plugins, and the cluster and the
    installed plugins of that process.
    """

    #: The installed plugins.
    registry: Registry
    #: Core's own parts and the selected plugins.
    parts: tuple[LoadedPlugin, ...]
    plan: Plan
    #: The place of this process among the launcher's; ``None`` if it is alone.
    cluster: ClusterEnvironment | None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Setup:
        """Select the parts and make the plan.

        Args:
            arguments: of a Trainer, by name; others are ignored.

        Raises:
            UsageError: anything that cannot work.
        """
        names = {field.name for field in fields(_Choices)} & arguments.keys()
        options, choices = Options.of(arguments), _Choices(**{n: arguments[n] for n in names})
        nodes = choices.num_nodes
        if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
            raise UsageError(f"num_nodes={nodes!r} must be a whole number, at least 1.")
        registry, cluster, assume = Registry(choices.block), detect(), choices.assume or {}
        devices, nodes = _as_launched(cluster, choices.accelerator, choices.devices, nodes)
        accelerator, passed = registry.select_accelerator(
            choices.accelerator, choices.accelerator_options or {}, assume
        )
        indices = select_devices(accelerator, devices, assume)
        strategy, also_passed = select_strategy(
            registry, choices.strategy, choices.strategy_options or {}, indices, nodes
        )
        extra = [
            *plugin_parts(registry, choices.plugins, choices.plugin_options or {}),
            *callback_parts(registry, choices.callbacks),
            *_implied(registry, choices),
        ]
        progress = _progress_parts(registry, extra) if options.enable_progress_bar else []
        precision = select_precision(registry, choices.precision)
        output = None if choices.output is None else user_path(choices.output, "output")
        is_first = ClusterEnvironment.starts_rank_0(cluster, nodes)
        # Progress before the other plugins: it then gets events last, after they have logged.
        selected = (accelerator, strategy, *progress, *extra)
        parts = (*_core_parts(options, output, is_first), precision, *selected)
        hooks = Hooks(parts)
        if is_first:
            _warn_of_failed(registry, choices, selected)
            hint = "use a hook of docs/hooks.md with @hookimpl, or callbacks=[...]"
            for part in (accelerator, strategy, *extra):
                if not hasattr(part.plugin, "as_plugin"):  # otherwise its as_plugin has checked it
                    warn_of_others(part.plugin, part.info.label, hint)
        plan = make_plan(
            hooks,
            accelerator=accelerator.info,
            strategy=strategy,
            devices=indices,
            plugins=tuple(part.info for part in (*extra, *progress)),
            num_nodes=nodes,
            precision=precision.info,
            passed_over=passed | also_passed,
            options=options,
            output=None if options.fast_dev_run else output,
            assumed=bool(assume),
        )
        return cls(registry, parts, plan, cluster)

    def __reduce__(self) -> tuple[Any, ...]:
        plugins = [part for part in self.parts if not part.info.is_core]
        return _received, (self.registry.block, self.plan, plugins)

    def with_plugins(self, plan: Plan, plugins: Iterable[LoadedPlugin]) -> Setup:
        """Return this setup with another plan, and with these parts besides core's own."""
        # It did not begin the run's folder: the setup from which it comes did.
        parts = (*_core_parts(plan.options, plan.output, False), *plugins)
        return replace(self, parts=parts, plan=plan)

    def hooks(self, module: Any, command: str, mode: str = "automatic") -> Hooks:
        """Return the hooks of one run, not yet frozen: also of plugins that only this run needs.

        Args:
            module: of the run; also command and mode, as in :class:`geartrain.Run`.

        Raises:
            UsageError: a plugin that the run needs is not installed, or is chosen too.
        """
        if mode == "session":
            return Hooks(self.parts)
        return Hooks(_run_parts(self.registry, self.parts, self.plan.options, module, command))

    def check(self, hooks: Hooks, module: Any) -> None:
        """Let the plugins refuse the plan for a module.

        Raises:
            UsageError: the plan cannot work.
        """
        check_joins(self.plan, hooks)
        hooks.check_plan(plan=self.plan, module=module)

    def reserved_folder(self, resumes: bool = False) -> AbstractContextManager[None]:
        """Keep other runs out of the run's folder, if it has one; see :meth:`RunFolder.reserved`.

        Raises:
            UsageError: another run is in the folder, or the plan is for assumed hardware.
        """
        if self.plan.assumed:
            raise UsageError(
                "this plan assumes hardware that this machine lacks (assume=): "
                "it can be explained, not run."
            )
        folder = next((p.plugin for p in self.parts if isinstance(p.plugin, RunFolder)), None)
        return nullcontext() if folder is None else folder.reserved(resumes)


def _received(block: Sequence[str], plan: Plan, plugins: Sequence[LoadedPlugin]) -> Setup:
    return Setup(Registry(block), (), plan, detect()).with_plugins(plan, plugins)


def _warn_of_failed(registry: Registry, choices: _Choices, parts: Sequence[LoadedPlugin]) -> None:
    """Warn about failed plugins that ``"auto"`` would have considered, or with a selected name."""
    names = {(part.info.kind, part.info.name.lower()) for part in parts}
    if str(choices.accelerator).lower() in ("auto", "gpu"):
        names |= {("accelerator", other.name.lower()) for other in registry.of("accelerator")}
    if str(choices.strategy).lower() == "auto":
        names |= {key for key in KNOWN if key[0] == "strategy"}
    names.add(("plugin", "progress"))  # which enable_progress_bar=True has tried
    for candidate in registry.candidates:
        if candidate.state == "failed" and (candidate.kind, candidate.name.lower()) in names:
            message = f"{candidate.label} is not used: {candidate.reason}"
            hint = f"use another version of {candidate.distribution}, or --block {candidate.label}"
            warn(message if "Fix: " in message else f"{message}. Fix: {hint}")


def _as_launched(
    cluster: ClusterEnvironment | None, accelerator: Any, devices: Any, num_nodes: int
) -> tuple[Any, int]:
    """Return ``devices`` and ``num_nodes``, from the launcher if the user gave none."""
    if cluster is None or cluster.launcher == "geartrain":
        return devices, num_nodes
    if devices == "auto" and accelerator == "cpu":
        devices = cluster.local_size
    return devices, cluster.nodes if num_nodes == 1 else num_nodes


def _core_parts(options: Options, output: Path | None, first: bool) -> list[LoadedPlugin]:
    """Return core's own parts for these options; ``first`` as in :class:`RunFolder`."""
    parts = [_core_part("defaults", Defaults(), "one process on one device", "default")]
    if output is not None and not options.fast_dev_run:
        parts.append(_core_part("folder", RunFolder(output, first), f"output={str(output)!r}"))
    if (limit := options.gradient_clip_val) is not None:
        reason = f"gradient_clip_val={limit}"
        clipping = import_from("geartrain_callbacks.manual.clipping", reason)
        parts.append(_core_part("clipping", clipping.GradientClipping(), reason))
    return parts


def _core_part(name: str, plugin: Any, reason: str, kind: str = "core") -> LoadedPlugin:
    return LoadedPlugin(PluginInfo(name, kind, "geartrain", __version__, reason), plugin)


def _run_parts(
    registry: Registry, parts: Sequence[LoadedPlugin], options: Options, module: Any, command: str
) -> tuple[LoadedPlugin, ...]:
    """Return the parts of one run: the trainer's, and those that the command and the module need.

    A ``fit`` with a folder needs the writer of last.ckpt. :func:`_implied` has the plugins.

    Raises:
        UsageError: a plugin that the run needs is not installed, or is chosen too.
    """
    if command == "fit" and any(type(part.plugin) is RunFolder for part in parts):
        parts = [*parts, _core_part("last_checkpoint", LastCheckpoint(), "output=")]
    for part in _implied(registry, options, module, command):
        name, reason = part.info.name, part.info.reason
        if hasattr(part.plugin, "added_for"):
            # As a part of core: hooks of the strategy and of the precision have precedence.
            part = replace(part, info=replace(part.info, kind="core"))
        elif any(other.info.name == name for other in parts):
            message = f"{reason} selects the plugin {name}, which is chosen too"
            raise UsageError(f"{message}. Fix: leave one of them out")
        if hasattr(part.plugin, "replace_parts"):
            parts = part.plugin.replace_parts(parts, module)
        parts = [*parts, part]
    return tuple(parts)


def _implied(
    registry: Registry, given: _Choices | Options, module: Any = None, command: str = ""
) -> Iterator[LoadedPlugin]:
    """Yield the plugins that arguments and the module imply, as ``registry.implied`` says.

    Raises:
        UsageError: one is not installed, or refuses the argument.
    """
    cls, defaults = (module if isinstance(module, type) else type(module)).__name__, type(given)()
    reasons = {"compile": [f"torch.compile({cls})"]} if hasattr(module, "_compile_with") else {}
    values = {}
    for condition, plugin in registry.implied:
        *places, name = condition.split(".")
        value = getattr(module if "Module" in places else given, name, None)
        kinds = {*places} - {"fit", "Module"}
        if ("fit" in places and command != "fit") or (kinds - {type(value).__name__}):
            continue
        if "Module" in places and overridden(module, name):
            shown = "" if callable(value) else f" = {value}"
            reasons.setdefault(plugin, []).append(f"{cls}.{name}{shown}")
        elif "Module" not in places and value != getattr(defaults, name, None):
            shown = name if name == "output" else f"{name}={value!r}"  # ranks have other folders
            reasons[plugin], values[plugin] = [shown], value
    for plugin, found in reasons.items():
        (name, _, option), reason = plugin.partition(":"), ", ".join(found)
        if not any(candidate.name == name for candidate in registry.of("plugin")):
            home = KNOWN["plugin", name]
            raise UsageError(f"{reason} needs {home}. Fix: pip install {home}")
        yield registry.select("plugin", name, {option: values[plugin]} if option else {}, reason)


def plugin_parts(
    registry: Registry, plugins: Any, options: Mapping[str, Mapping[str, Any]]
) -> list[LoadedPlugin]:
    """Return the selected plugins, in the order given.

    Args:
        plugins: one or several names of installed plugins, files, classes or objects.
        options: name -> options, for plugins that are given by name or file.

    Raises:
        UsageError: a plugin is unknown, broken or given twice; options without their plugin.
    """
    is_one = isinstance(plugins, str) or not isinstance(plugins, Iterable)
    given = [plugins] if is_one else list(plugins)
    parts, remaining = [], dict(options)
    for plugin in given:
        if not isinstance(plugin, str):
            parts.append(registry.adopt("plugin", plugin, "given as an object"))
        elif plugin.partition(":")[0].endswith(".py"):
            name, found = _read_file(plugin)
            given_options = remaining.pop(name, {})
            if given_options and not isinstance(found, type):
                message = f"{plugin} is a file of functions and takes no options"
                raise UsageError(f"{message}. Fix: use a class with a typed __init__")
            info = PluginInfo(name, "plugin", None, None, f"--plugin {plugin}")
            made = _of_file(plugin, given_options)
            recreate = partial(_of_file, os.path.abspath(plugin), given_options)
            parts.append(LoadedPlugin(info, made, given_options, recreate))
        else:
            given_options = remaining.pop(plugin, {})
            parts.append(registry.select("plugin", plugin, given_options, f"--plugin {plugin}"))
    for part in parts:
        if added_for := getattr(part.plugin, "added_for", ""):
            message = f"{part.info.label} is added to a run for {added_for}, and to no other"
            raise UsageError(f"{message}. Fix: leave it out of the plugins")
    pairs = zip(parts, given, strict=True)
    labels = [part.info.label for part, plugin in pairs if isinstance(plugin, str)]
    for label in labels:
        if labels.count(label) > 1:
            raise UsageError(f"{label}: the same plugin is given twice. Fix: give it once.")
    if remaining:
        message = f"options are given for {', '.join(map(repr, remaining))}"
        hint = f"--plugin {next(iter(remaining))}"
        raise UsageError(f"{message}, which is not among the chosen plugins. Fix: {hint}")
    return parts


def _read_file(plugin: str) -> tuple[str, Any]:
    """Return the name and the class, or the module, of ``my_hooks.py`` or ``my_hooks.py:Class``."""
    files = import_from("geartrain_cli.plugin_files", f"the reader of plugins in files, {plugin},")
    read: tuple[str, Any] = files.file_plugin(plugin)
    return read


def _of_file(plugin: str, options: Mapping[str, Any]) -> Any:
    _, found = _read_file(plugin)
    made = make(found, plugin, options) if isinstance(found, type) else found
    return made.as_plugin() if hasattr(made, "as_plugin") else made


def callback_parts(registry: Registry, callbacks: Any) -> list[LoadedPlugin]:
    """Return the plugins of ``callbacks``, which geartrain-callbacks makes."""
    if callbacks in ((), []):
        return []
    parts: list[LoadedPlugin]
    parts = import_from("geartrain_callbacks.callback", "callbacks=").parts(registry, callbacks)
    return parts


def _progress_parts(registry: Registry, extra: Sequence[LoadedPlugin]) -> list[LoadedPlugin]:
    """Return the plugin ``progress`` if it is installed and no plugin in ``extra`` replaces it."""
    shown = any(getattr(part.plugin, "shows_progress", False) for part in extra)
    candidates = [c for c in registry.of("plugin") if c.name.lower() == "progress" and not shown]
    if any(map(registry.check_usable, candidates)):
        return [registry.select("plugin", "progress", {}, "enable_progress_bar=True")]
    return []
