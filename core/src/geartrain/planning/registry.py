"""Find plugins by their entry points, select them by name, and import only selected ones.

Listing reads only metadata: it imports neither torch nor any plugin. A plugin that is not selected
may be broken, blocked or lack a dependency: it is listed with the reason, and has no other effect.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial
from types import ModuleType
from typing import Any

from importlib_metadata import Distribution, EntryPoint, PackageNotFoundError, version

from geartrain._version import __version__
from geartrain.errors import UsageError, nearest
from geartrain.errors.distributions import canonical, entry_points
from geartrain.errors.hints import hint
from geartrain.errors.known import KNOWN
from geartrain.hooks.plugin_info import GROUPS, LoadedPlugin, PluginInfo
from geartrain.hookspecs import CONTRACT
from geartrain.planning.hardware import (
    printing_to_stderr,
    priority_of,
    reason_unusable,
    visible_devices,
)

#: The accelerators that ``accelerator="gpu"`` may select.
_GPUS = ("cuda", "mps")


@dataclass(slots=True, eq=False)
class InstalledPlugin:
    """One installed plugin, from its metadata."""

    name: str
    kind: str
    distribution: str
    version: str
    entry_point: EntryPoint
    #: ``selected``, ``available``, ``unavailable``, ``failed`` or ``blocked``.
    state: str = "available"
    reason: str = ""
    #: True if it was imported and, as an accelerator, asked if it can be used.
    probed: bool = False
    #: True if another distribution claims this name, and this one does not win.
    contested: bool = False

    @property
    def label(self) -> str:
        """The name in errors: ``distribution[name]``."""
        return f"{self.distribution}[{self.name}]"

    @property
    def is_ours(self) -> bool:
        """True if core, or our distribution of this name, provides it: it wins over any other."""
        home = KNOWN.get((self.kind, self.name.lower()))
        return canonical(self.distribution) in ("geartrain", home)

    def info(self, reason: str) -> PluginInfo:
        """Return its identity as a selected plugin."""
        return PluginInfo(self.name, self.kind, self.distribution, self.version, reason)

    def fail(self, reason: str) -> str:
        """Record and return why this plugin cannot be used."""
        self.state, self.reason = "failed", reason
        return reason

    def as_dict(self) -> dict[str, str]:
        """Return a row of ``geartrain plugins --json``.

        Its state is ``installed`` instead of ``available`` if nothing was probed.
        """
        keys = ("name", "kind", "state", "reason", "distribution", "version")
        row = {key: getattr(self, key) for key in keys}
        if self.state == "available" and not self.probed:
            row["state"] = "installed"
        return row


class Registry:
    """The installed plugins and commands.

    Args:
        block: names, or ``DISTRIBUTION[name]``, that must not be selected, in addition to those in
            the environment variable ``GEARTRAIN_BLOCK`` (comma-separated).

    Raises:
        UsageError: ``block`` has a name that nothing installed has.
    """

    #: Returns the entry points of a group, for plugins that have plugins.
    entry_points = staticmethod(entry_points)

    def __init__(self, block: Iterable[str] = ()) -> None:
        found, self.block = _installed(), tuple(block)
        self.candidates = [plugin for plugin in found if plugin.kind in GROUPS]
        #: What implies a plugin, and the plugin: ``("max_time", "timer:duration")``. The first is a
        #: Trainer's argument that differs from its default, or ``Module.NAME``, which a module
        #: overrides; after ``fit.`` only in a fit, after ``TYPE.`` only a value of this type. An
        #: option gets the argument.
        self.implied = [(p.name, p.entry_point.value) for p in found if p.kind == "implied"]
        self._block(self.block, "--block")
        variable = "GEARTRAIN_BLOCK"
        self._block((n.strip() for n in os.environ.get(variable, "").split(",")), variable)
        self._settle_names()

    def _block(self, names: Iterable[str], by: str) -> None:
        for name in filter(None, names):
            hit = [c for c in self.candidates if name.lower() in (c.name.lower(), c.label.lower())]
            if not hit and by == "--block":
                known = [known for c in self.candidates for known in (c.name, c.label)]
                meant = nearest(name, known)
                raise UsageError(f"{by} {name}: nothing installed has that name. {meant}")
            for candidate in hit:
                candidate.state, candidate.reason = "blocked", f"by {by}"

    def _settle_names(self) -> None:
        """If several distributions claim a name, give it to ours or to none.

        The meaning of a name must not depend on which others are installed.
        """
        claims: dict[tuple[str, str], list[InstalledPlugin]] = {}
        for candidate in self.candidates:
            if candidate.state != "blocked":
                claims.setdefault((candidate.kind, candidate.name.lower()), []).append(candidate)
        for same in claims.values():
            preferred = next((c for c in same if c.is_ours), None)
            for candidate in same if len(same) > 1 else ():
                if candidate is preferred:
                    continue
                message = f"{' and '.join(c.label for c in same)} claim the same name"
                remedy = f"uninstall one, or --block {same[0].label}"
                if preferred:
                    message = f"the name is {preferred.label}'s"
                    remedy = f"uninstall {candidate.distribution}, or --block {candidate.label}"
                candidate.contested, candidate.state = True, "failed"
                candidate.reason = f"{message}; {remedy}"

    def of(self, kind: str) -> list[InstalledPlugin]:
        """Return the candidates of one kind."""
        return [c for c in self.candidates if c.kind == kind]

    # --- find -------------------------------------------------------------------------------------

    def find(self, kind: str, name: str) -> InstalledPlugin:
        """Return the one candidate of that kind and name; names are case-insensitive.

        Raises:
            UsageError: unknown, not installed, blocked, or claimed by two distributions.
        """
        hits = [c for c in self.of(kind) if c.name.lower() == name.lower()]
        if not hits:
            raise UsageError(self._missing(kind, name))
        remaining = [c for c in hits if c.state != "blocked"]
        if not remaining:
            message = f"{hits[0].label} is blocked {hits[0].reason}"
            remedy = f"Fix: remove it from --block or GEARTRAIN_BLOCK, or choose another {kind}"
            raise UsageError(f"{message}. {remedy}.")
        found = next((c for c in remaining if not c.contested), remaining[0])
        if found.contested:
            message, _, remedy = found.reason.partition("; ")
            raise UsageError(f"{kind} {name!r}: {message}. Fix: {remedy}")
        return found

    def _missing(self, kind: str, name: str) -> str:
        lower, unknown = name.lower(), f"there is no {kind} {name!r}"
        if (kind, lower) in KNOWN:
            return f"{kind} {name!r} is not installed. Fix: pip install {KNOWN[kind, lower]}"
        if instead := hint(kind, lower):
            return f"{unknown}. Fix: {instead}"
        known = [*((c.kind, c.name) for c in self.candidates), *KNOWN, ("accelerator", "gpu")]
        options = {n.lower(): f"--{k} {n}" for k, n in known if k != "command"}
        if other := options.get(lower):
            return f"{name!r} is no {kind} but belongs to {other.split()[0]}. Fix: {other}"
        same = {n.lower(): repr(n) for k, n in known if k == kind}
        for names in (same, options):  # two: dpp is as near to dp as to ddp
            if close := get_close_matches(lower, names, n=2):
                return f"{unknown}. Did you mean {' or '.join(names[n] for n in close)}?"
        return f"{unknown}. Known: {', '.join(sorted(same))}."

    # --- load -------------------------------------------------------------------------------------

    def load(self, candidate: InstalledPlugin) -> Any:
        """Import a candidate's class; of a command, its function.

        Raises:
            UsageError: it needs another geartrain, its import failed (the cause is attached), or
                its entry point is neither a class nor a function.
        """
        label, home = candidate.label, candidate.distribution
        if canonical(home) != "geartrain" and (reason := _mismatch(candidate)):
            reason += f", or use another version of {home}"
            raise UsageError(f"{label}: {candidate.fail(reason)}")
        try:
            loaded = candidate.entry_point.load()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plugin may fail in any way, sys.exit included
            message = f"{type(error).__name__}: {error}"
            # Never "pip install MODULE": a distribution of that name may be unrelated.
            remedy = f"pip install --force-reinstall {home}, or --block {label}"
            if isinstance(error, ModuleNotFoundError) and error.name == "torch":
                message = "torch is not installed"
                remedy = "pip install torch (a build for your hardware)"
            message = f"{label} could not be imported: {candidate.fail(message)}"
            raise UsageError(f"{message}. Fix: {remedy}") from error
        is_command = candidate.kind == "command"
        if not (callable(loaded) if is_command else inspect.isclass(loaded)):
            wanted = "function" if is_command else "class"
            reason = candidate.fail(f"its entry point gives {loaded!r}, not a {wanted}")
            remedy = f"name a {wanted} in its [project.entry-points]"
            raise UsageError(f"{label}: {reason}. Fix: {remedy}")
        return loaded

    def check_usable(self, candidate: InstalledPlugin) -> Any:
        """Import a candidate, and ask an accelerator if it can be used. Set its state and reason.

        Returns:
            Its class if it can be used, else ``None``.
        """
        if candidate.state != "available":
            return None
        with printing_to_stderr():
            try:
                cls = self.load(candidate)
                reason = reason_unusable(cls) if candidate.kind == "accelerator" else None
            except UsageError as error:
                if candidate.state == "available":
                    candidate.fail(str(error))
                return None
        if reason:
            candidate.state, candidate.reason = "unavailable", reason
            return None
        candidate.probed = True
        return cls

    def select(
        self, kind: str, name: str, options: Mapping[str, Any] | None = None, reason: str = ""
    ) -> LoadedPlugin:
        """Find, import and make one plugin.

        Args:
            options: for its ``__init__``.
            reason: why it was selected, for the plan.

        Raises:
            UsageError: it cannot be found, imported or made with these options.
        """
        candidate = self.find(kind, name)
        cls = self.load(candidate)
        try:
            made = make(cls, candidate.label, options or {})
            plugin = made.as_plugin() if hasattr(made, "as_plugin") else made
        except Exception as error:
            candidate.fail(f"its __init__ raised {type(error).__name__}: {error}")
            raise
        candidate.state, candidate.reason = "selected", reason
        given = dict(options or {})
        recreate = partial(_reselected, kind, candidate.name, given)
        return LoadedPlugin(candidate.info(reason), plugin, given, recreate)

    def adopt(self, kind: str, given: Any, reason: str) -> LoadedPlugin:
        """Return the part of a user's object or class; named as its entry point, if it has one.

        An object that is no plugin itself may have ``as_plugin()``, which returns its plugin.
        """
        plugin = make(given, given.__name__, {}) if inspect.isclass(given) else given
        cls = type(plugin)
        name = plugin.__name__ if isinstance(plugin, ModuleType) else cls.__name__
        info = PluginInfo(name, kind, None, None, reason)
        for candidate in self.of(kind):
            if _names(candidate.entry_point, cls):
                candidate.state, candidate.reason = "selected", reason
                info = candidate.info(reason)
                break
        return LoadedPlugin(info, plugin.as_plugin() if hasattr(plugin, "as_plugin") else plugin)

    # --- accelerators -----------------------------------------------------------------------------

    def select_accelerator(
        self, given: Any, options: Mapping[str, Any], assume: Mapping[str, int]
    ) -> tuple[LoadedPlugin, dict[str, str]]:
        """Return the accelerator, and the others with the reason against each.

        Args:
            given: a name, ``"auto"``, ``"gpu"``, or a user's object or class.
            options: for its ``__init__``.
            assume: accelerator name -> device count, to plan for hardware that this machine lacks.

        Raises:
            UsageError: the accelerator is unknown or not usable, or none is usable.
        """
        for assumed in assume:
            self.find("accelerator", assumed)
        if not isinstance(given, str):
            part = self.adopt("accelerator", given, "given as an object")
            _check_usable(part, assume)
            return part, {}
        name = given.lower()
        if name in ("auto", "gpu"):
            return self._best_accelerator(name, options, assume)
        installed = {kind: {c.name.lower() for c in self.of(kind)} for kind in GROUPS}
        is_strategy = ("strategy", name) in KNOWN or name in installed["strategy"]
        if is_strategy and name not in installed["accelerator"]:
            remedy = f"strategy={given!r} (--strategy {given})"
            raise UsageError(f"accelerator={given!r} is a strategy. Fix: {remedy}")
        part = self.select("accelerator", name, options, f"--accelerator {given}")
        _check_usable(part, assume)
        return part, {}

    def _best_accelerator(
        self, name: str, options: Mapping[str, Any], assume: Mapping[str, int]
    ) -> tuple[LoadedPlugin, dict[str, str]]:
        passed: dict[str, str] = {}
        usable: list[tuple[float, InstalledPlugin]] = []
        for candidate in self.of("accelerator"):
            if name == "gpu" and candidate.name.lower() not in _GPUS:
                continue
            # Only accelerators are imported without being named: they must be asked.
            assumed = candidate.name in assume and candidate.state == "available"
            cls = self.load(candidate) if assumed else self.check_usable(candidate)
            if cls is None:
                passed[candidate.label] = f"{candidate.state}: {candidate.reason}"
            else:
                usable.append((_priority(cls, candidate), candidate))
        passed |= self._not_installed()
        usable.sort(key=lambda pair: (-pair[0], pair[1].name))
        if usable:
            (priority, best), *others = usable
            equal = ", the first by name" if any(other == priority for other, _ in others) else ""
            reason = f"{name!r}: the usable accelerator of the highest priority ({priority}){equal}"
            part = self.select("accelerator", best.name, options, reason)
            for lower, candidate in others:
                cause = f"its priority {lower} is not above {best.name}'s {priority}"
                passed[candidate.label] = f"available, but {cause}"
            return part, passed
        cause = "; ".join(f"{label} is {reason}" for label, reason in passed.items())
        cause = cause or "Fix: pip install geartrain-cuda (or geartrain-mps)"
        raise UsageError(f"accelerator={name!r}: no usable one is installed. {cause}")

    def _not_installed(self) -> dict[str, str]:
        """Return this machine's hardware without a plugin: its label -> the install line."""
        installed = {candidate.name.lower() for candidate in self.of("accelerator")}
        passed = {}
        for name, message in visible_devices().items():
            if name not in installed:
                home = KNOWN["accelerator", name]
                reason = f"not installed, though this machine has {message}"
                passed[f"{home}[{name}]"] = f"{reason}. Fix: pip install {home}"
        return passed


def _reselected(kind: str, name: str, options: Mapping[str, Any]) -> Any:
    return Registry().select(kind, name, options).plugin


def _check_usable(part: LoadedPlugin, assume: Mapping[str, int]) -> None:
    if part.info.name in assume:
        return
    try:
        reason = reason_unusable(part.plugin)
    except UsageError as error:
        raise UsageError(f"{part.info.label}: {error}") from error.__cause__
    if reason:
        raise UsageError(f"{part.info.label} cannot be used here: {reason}")


def _priority(cls: Any, candidate: InstalledPlugin) -> float:
    try:
        return priority_of(cls)
    except UsageError as error:  # of an assumed accelerator: all others were asked before
        raise UsageError(f"{candidate.label}: {error}") from None


def _mismatch(candidate: InstalledPlugin) -> str:
    """Return what of geartrain a distribution needs in another version, with the fix; or ""."""
    # Not above: it would slow down the listing of plugins.
    from packaging.requirements import InvalidRequirement, Requirement

    if (dist := candidate.entry_point.dist) is None:
        return ""
    names = dist.entry_points.select(group="geartrain.contract").names
    contracts = [int(name) for name in names if name.isdecimal()]
    if contracts and CONTRACT not in contracts:
        newest = max(contracts)
        message = f"it is built for version {newest} of the hooks, and geartrain {__version__} has"
        hint = "update its hookimpls" if newest < CONTRACT else "pip install -U geartrain"
        return f"{message} {CONTRACT}. Fix: {hint}"
    for line in dist.requires or ():
        try:
            needed = Requirement(line)
            name = canonical(needed.name)
            installed = version(name) if name.startswith("geartrain") else ""
        except (InvalidRequirement, PackageNotFoundError):
            continue  # geartrain doctor reports it
        applies = needed.marker is None or needed.marker.evaluate({"extra": ""})
        if installed and applies and not needed.specifier.contains(installed, prereleases=True):
            plain = f"{name}{needed.specifier}"
            message = f"it requires {plain}, and {name} {installed} is installed"
            return f"{message}. Fix: pip install '{plain}'"
    return ""


def _installed() -> list[InstalledPlugin]:
    every = sorted(entry_points(), key=lambda ep: (ep.name, ep.value))
    return [
        InstalledPlugin(ep.name, kind, *_name_and_version(ep.dist), ep)
        for kind, group in {**GROUPS, "implied": "geartrain.implied"}.items()
        for ep in every
        if ep.group == group
    ]


@cache  # each call would parse the file again
def _name_and_version(distribution: Distribution | None) -> tuple[str, str]:
    metadata = distribution.metadata if distribution else {"Name": "?", "Version": "?"}
    return metadata["Name"], metadata["Version"]


def _names(entry_point: EntryPoint, cls: type) -> bool:
    """True if an entry point names this class. Imports nothing."""
    module, _, attribute = entry_point.value.partition(":")
    return getattr(sys.modules.get(module.strip()), attribute.strip(), None) is cls


def make(cls: type, label: str, options: Mapping[str, Any]) -> Any:
    """Call a plugin's class with its options.

    Raises:
        UsageError: an unknown option, a missing one, or an error that ``__init__`` raised.
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
        if str(error).startswith(label):
            raise
        raise UsageError(f"{label}: {error}") from error
    except Exception as error:
        error.add_note(f"raised while {label} was created")
        raise
