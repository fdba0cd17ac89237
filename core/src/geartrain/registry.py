"""Find plugins by their entry points, choose them by name, and import only what was chosen.

Reads metadata alone: listing what is installed imports neither torch nor any plugin. Plugins that are not chosen may be
broken, blocked or missing a dependency; they are listed with the reason and change nothing else.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from importlib_metadata import EntryPoint, entry_points

from geartrain.errors import UsageError, nearest
from geartrain.hardware import ask
from geartrain.parts import Choice, Part
from geartrain.porting.names import SPELT

#: kind -> entry-point group.
GROUPS = {"accelerator": "geartrain.accelerators", "strategy": "geartrain.strategies", "plugin": "geartrain.plugins"}

#: Names that geartrain's own distributions provide: (kind, name) -> distribution. What is not here gets no install line.
KNOWN = {
    ("accelerator", "cuda"): "geartrain-cuda",
    ("accelerator", "mps"): "geartrain-mps",
    ("strategy", "dp"): "geartrain-dp",
    ("strategy", "ddp2"): "geartrain-dp",
    ("strategy", "ddp"): "geartrain-ddp",
    ("strategy", "ddp_spawn"): "geartrain-spawn",
    ("strategy", "spawn"): "geartrain-spawn",
    ("strategy", "horovod"): "geartrain-horovod",
    ("strategy", "bagua"): "geartrain-bagua",
    ("plugin", "device_stats"): "geartrain-device-stats",
    ("plugin", "tensorboard"): "geartrain-tensorboard",
    ("plugin", "wandb"): "geartrain-wandb",
    ("plugin", "mlflow"): "geartrain-mlflow",
}

#: Names that users of Lightning may type and that no distribution provides.
NOT_SHIPPED = {("accelerator", name) for name in ("tpu", "hpu", "ipu", "xla")} | {
    ("strategy", name)
    for name in ("ddp_sharded", "ddp_sharded_spawn", "ddp_fully_sharded", "deepspeed", "fsdp", "tpu", "tpu_spawn", "xla", "colossalai")
}


#: What the last scan of the metadata depended on, and what it found: it takes 13 ms for some hundred distributions.
_scanned: tuple[Any, list[tuple[str, str, str, str, EntryPoint]]] | None = None


@dataclass(slots=True, eq=False)
class Candidate:
    """One installed plugin, as its metadata tells."""

    name: str
    kind: str
    distribution: str
    version: str
    entry_point: EntryPoint
    #: ``selected``, ``available``, ``unavailable``, ``failed`` or ``blocked``.
    state: str = "available"
    reason: str = ""
    #: Labels of every distribution that claims this name, where there are several.
    rivals: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.distribution}[{self.name}]"

    def as_dict(self) -> dict[str, str]:
        return {key: getattr(self, key) for key in ("name", "kind", "state", "reason", "distribution", "version")}


class Registry:
    """What is installed.

    Args:
        block: names that must not be chosen, beside those in the environment variable ``GEARTRAIN_BLOCK`` (comma-separated).

    Raises:
        UsageError: ``block`` has a name that nothing installed has.
    """

    def __init__(self, block: Iterable[str] = ()) -> None:
        self.candidates = _installed()
        for candidate in self.candidates:
            same = [c.label for c in self.candidates if (c.kind, c.name.lower()) == (candidate.kind, candidate.name.lower())]
            if len(same) > 1:
                candidate.rivals = same
                candidate.state, candidate.reason = "failed", f"{' and '.join(same)} claim the same name; uninstall one"
        self._block(block, "--block")
        self._block((n.strip() for n in os.environ.get("GEARTRAIN_BLOCK", "").split(",")), "GEARTRAIN_BLOCK")

    def _block(self, names: Iterable[str], by: str) -> None:
        for name in filter(None, names):
            hit = [c for c in self.candidates if c.name.lower() == name.lower()]
            if not hit and by == "--block":
                raise UsageError(f"{by} {name}: nothing installed has that name. {nearest(name, (c.name for c in self.candidates))}")
            for candidate in hit:
                candidate.state, candidate.reason = "blocked", f"by {by}"

    def of(self, kind: str) -> list[Candidate]:
        return [c for c in self.candidates if c.kind == kind]

    # --- find ------------------------------------------------------------------------------------------------------------

    def find(self, kind: str, name: str) -> Candidate:
        """The one candidate of that kind and name; names are case-insensitive.

        Raises:
            UsageError: unknown, not installed, blocked, or claimed by two distributions.
        """
        hits = [c for c in self.of(kind) if c.name.lower() == name.lower()]
        if not hits:
            raise UsageError(self._missing(kind, name))
        if hits[0].state == "blocked":
            raise UsageError(f"{hits[0].label} is blocked {hits[0].reason}. Fix: lift the block, or choose another {kind}.")
        if hits[0].rivals:
            raise UsageError(f"{kind} {name!r}: {hits[0].reason}.")
        return hits[0]

    def _missing(self, kind: str, name: str) -> str:
        installed = [c.name for c in self.of(kind)]
        key = (kind, name.lower())
        if key in KNOWN:
            return f"{kind} {name!r} is not installed. Fix: pip install {KNOWN[key]}"
        if key in NOT_SHIPPED:
            return f"there is no {kind} {name!r}: no geartrain distribution provides it. Installed: {', '.join(installed)}."
        if kind == "strategy" and key[1] in SPELT:
            new, options = SPELT[key[1]]
            return f"there is no strategy {name!r}. Fix: strategy={new!r}" + (f" with strategy_options={options}" if options else "")
        other = next((c for c in self.candidates if c.name.lower() == name.lower()), None)
        if other:
            return f"{name!r} is no {kind} but belongs to --{other.kind}. Fix: --{other.kind} {other.name}"
        elsewhere = next((k for k, n in [*KNOWN, *NOT_SHIPPED] if n == name.lower()), None)
        if elsewhere:
            return f"{name!r} is no {kind} but belongs to --{elsewhere}. Fix: --{elsewhere} {name.lower()}"
        known = installed + [n for k, n in KNOWN if k == kind]
        return f"there is no {kind} {name!r}. {nearest(name, known)}"

    # --- load ------------------------------------------------------------------------------------------------------------

    def load(self, candidate: Candidate) -> Any:
        """Import a candidate's class.

        Raises:
            UsageError: the import failed, or gave something else than a class; the cause is attached.
        """
        try:
            loaded = candidate.entry_point.load()
        except BaseException as error:  # a plugin may fail in any way, sys.exit included; whoever chose it must read why
            if isinstance(error, KeyboardInterrupt):
                raise
            candidate.state, candidate.reason = "failed", f"{type(error).__name__}: {error}"
            hint = f"pip install {error.name}" if isinstance(error, ModuleNotFoundError) and error.name else "reinstall or --block it"
            raise UsageError(f"{candidate.label} could not be imported: {candidate.reason}. Fix: {hint}") from error
        if not inspect.isclass(loaded):
            candidate.state, candidate.reason = "failed", f"its entry point gives {loaded!r}, not a class"
            raise UsageError(f"{candidate.label}: {candidate.reason}. Fix: name a class in its [project.entry-points]")
        return loaded

    def probe(self, candidate: Candidate) -> Any:
        """Import a candidate and, if it is an accelerator, ask whether it can serve here. Sets state and reason.

        Returns:
            Its class if it can serve, else ``None``.
        """
        if candidate.state != "available":
            return None
        try:
            cls = self.load(candidate)
        except UsageError:
            return None
        try:
            reason = ask(cls) if candidate.kind == "accelerator" else None
        except UsageError as error:
            candidate.state, candidate.reason = "failed", str(error)
            return None
        if reason:
            candidate.state, candidate.reason = "unavailable", reason
            return None
        return cls

    def select(self, kind: str, name: str, options: Mapping[str, Any] | None = None, reason: str = "") -> Part:
        """Find, import and make one plugin with its options."""
        candidate = self.find(kind, name)
        cls = self.load(candidate)
        plugin = make(cls, candidate.label, options or {})
        candidate.state, candidate.reason = "selected", reason
        choice = Choice(candidate.name, kind, candidate.distribution, candidate.version, reason)
        return Part(choice, plugin, dict(options or {}), source=candidate.name)

    def adopt(self, kind: str, given: Any, reason: str) -> Part:
        """A part for an object or a class that the user made; its entry point's name where it has one."""
        plugin = make(given, given.__name__, {}) if inspect.isclass(given) else given
        cls = type(plugin)
        for candidate in self.of(kind):
            if _names(candidate.entry_point, cls):
                candidate.state, candidate.reason = "selected", reason
                return Part(Choice(candidate.name, kind, candidate.distribution, candidate.version, reason), plugin)
        name = plugin.__name__ if isinstance(plugin, ModuleType) else cls.__name__
        return Part(Choice(name, kind, None, None, reason), plugin)


def _installed() -> list[Candidate]:
    """Return all that is installed; the metadata are read again only after a folder of ``sys.path`` has changed."""
    global _scanned
    state = (entry_points, [(path, _changed_at(path)) for path in sys.path])
    if _scanned is None or _scanned[0] != state:
        _scanned = (state, _scan())
    return [Candidate(*found) for found in _scanned[1]]


def _changed_at(path: str) -> int | None:
    try:
        return os.stat(path or ".").st_mtime_ns
    except OSError:
        return None


def _scan() -> list[tuple[str, str, str, str, EntryPoint]]:
    """Read what :class:`Candidate` has of every plugin, in one pass over the metadata; of each distribution they are read once."""
    every = entry_points()
    named: dict[int, tuple[str, str]] = {}

    def found(kind: str, ep: EntryPoint) -> tuple[str, str, str, str, EntryPoint]:
        if id(ep.dist) not in named:
            named[id(ep.dist)] = (ep.dist.name, ep.dist.version) if ep.dist else ("?", "?")
        return (ep.name, kind, *named[id(ep.dist)], ep)

    return [
        found(kind, ep)
        for kind, group in GROUPS.items()
        for ep in sorted((ep for ep in every if ep.group == group), key=lambda ep: (ep.name, ep.value))
    ]


def _names(entry_point: EntryPoint, cls: type) -> bool:
    """Whether an entry point names this class; nothing is imported for it."""
    module, _, attribute = entry_point.value.partition(":")
    return getattr(sys.modules.get(module.strip()), attribute.strip(), None) is cls


def make(cls: type, label: str, options: Mapping[str, Any]) -> Any:
    """Call a plugin's class with its options.

    Raises:
        UsageError: an option that its ``__init__`` does not have, or a required one that is missing.
    """
    try:
        inspect.signature(cls).bind(**options)
    except TypeError as error:
        known = list(inspect.signature(cls).parameters)
        unknown = next((name for name in options if name not in known), None)
        hint = nearest(unknown, known) if unknown else f"Its options: {', '.join(known)}."
        raise UsageError(f"{label}: {error}. {hint}") from error
    try:
        return cls(**options)
    except UsageError as error:
        raise error if str(error).startswith(label) else UsageError(f"{label}: {error}") from error


# --- one-file plugins ----------------------------------------------------------------------------------------------------


def load_file(path: Path, name: str | None = None) -> ModuleType:
    """Import a Python file as a module named after it, with its folder on ``sys.path`` as ``python FILE`` would have it.

    Raises:
        UsageError: there is no such file, or it raises.
    """
    if not path.is_file():
        beside = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise UsageError(f"there is no file {path}. {nearest(path.name, beside)}")
    name = name or path.stem
    loaded = sys.modules.get(name)
    if loaded is not None:
        if getattr(loaded, "__file__", None) and Path(str(loaded.__file__)).resolve() == path.resolve():
            return loaded
        raise UsageError(f"{path} would be imported as {name!r}, and a module of that name is loaded already. Fix: rename the file.")
    if str(path.parent.resolve()) not in sys.path:
        sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == str(path)]
        where = f"{path}:{lines[-1]}" if lines else str(path)
        raise UsageError(f"{path} could not be imported: {type(error).__name__}: {error} ({where})") from error
    return module


def is_file(name: str) -> bool:
    """Whether a plugin's name is a file: ``my_hooks.py`` or ``my_hooks.py:Class``."""
    return name.partition(":")[0].endswith(".py")


def file_plugin(spec: str) -> tuple[str, Any]:
    """The plugin in a file: its one class with hookimpls, or the module itself where functions are marked.

    Args:
        spec: ``file.py`` or ``file.py:Class``.

    Returns:
        The name by which its options are given (the file's stem, or the class), and the class or module.
    """
    file, _, wanted = spec.partition(":")
    module = load_file(Path(file))
    classes = {
        name: cls
        for name, cls in vars(module).items()
        if inspect.isclass(cls) and cls.__module__ == module.__name__ and _has_hookimpls(cls)
    }
    if wanted:
        if wanted not in classes:
            raise UsageError(f"{file} has no plugin class {wanted!r}. {nearest(wanted, classes)}")
        return wanted, classes[wanted]
    if _has_hookimpls(module):
        if classes:
            raise UsageError(f"{file} marks functions and classes with @hookimpl. Fix: name one: {file}:{next(iter(classes))}")
        return module.__name__, module
    if not classes:
        raise UsageError(f"{file} has nothing marked with @hookimpl. Fix: from geartrain import hookimpl, and mark what it should do")
    if len(classes) > 1:
        raise UsageError(f"{file} has several plugins. Fix: name one: {' or '.join(f'{file}:{name}' for name in classes)}")
    return module.__name__, next(iter(classes.values()))


def _has_hookimpls(thing: Any) -> bool:
    found = (getattr(thing, name, None) for name in dir(thing))
    return any(inspect.isroutine(item) and hasattr(item, "geartrain_impl") for item in found)
