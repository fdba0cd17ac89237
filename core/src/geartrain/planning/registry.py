"""Find plugins by their entry points, select them by name, and import only selected ones.

Listing reads metadata alone: it imports neither torch nor any plugin. A plugin that is not selected may be broken, blocked or lack a
dependency; it is listed with the reason and changes nothing else.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from importlib_metadata import EntryPoint, entry_points

from geartrain._version import __version__
from geartrain.errors import UsageError, nearest
from geartrain.errors.hints import hint
from geartrain.errors.known import KNOWN, NOT_SHIPPED
from geartrain.hooks.plugin_info import GROUPS, LoadedPlugin, PluginInfo
from geartrain.planning.hardware import ask

#: The state of ``sys.path`` at the last scan of the metadata, and its result: a scan takes 13 ms for some hundred distributions.
_scanned: tuple[Any, list[tuple[str, str, str, str, EntryPoint]]] | None = None


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
    #: True if another distribution claims this name, and this one does not win.
    contested: bool = False

    @property
    def label(self) -> str:
        return f"{self.distribution}[{self.name}]"

    @property
    def is_ours(self) -> bool:
        """True if core provides it, or the distribution of ours that the name belongs to: these win over others of the same name."""
        return canonical(self.distribution) in (
            "geartrain",
            KNOWN.get((self.kind, self.name.lower())),
        )

    def fail(self, reason: str) -> str:
        """Note and return why this plugin cannot be used."""
        self.state, self.reason = "failed", reason
        return reason

    def as_dict(self) -> dict[str, str]:
        """Return a row of ``geartrain plugins --json``."""
        return {
            key: getattr(self, key)
            for key in ("name", "kind", "state", "reason", "distribution", "version")
        }


class Registry:
    """The installed plugins and commands.

    Args:
        block: names that must not be selected, or ``DISTRIBUTION[name]``, beside those in the environment variable ``GEARTRAIN_BLOCK``
            (comma-separated).

    Raises:
        UsageError: ``block`` has a name that nothing installed has.
    """

    def __init__(self, block: Iterable[str] = ()) -> None:
        self.candidates = _installed()
        self._block(block, "--block")
        self._block(
            (n.strip() for n in os.environ.get("GEARTRAIN_BLOCK", "").split(",")), "GEARTRAIN_BLOCK"
        )
        self._settle_names()

    def _block(self, names: Iterable[str], by: str) -> None:
        for name in filter(None, names):
            hit = [c for c in self.candidates if name.lower() in (c.name.lower(), c.label.lower())]
            if not hit and by == "--block":
                known = [known for c in self.candidates for known in (c.name, c.label)]
                raise UsageError(
                    f"{by} {name}: nothing installed has that name. {nearest(name, known)}"
                )
            for candidate in hit:
                candidate.state, candidate.reason = "blocked", f"by {by}"

    def _settle_names(self) -> None:
        """If several distributions claim a name, only ours may have it: a name must not depend on which others are installed."""
        claims: dict[tuple[str, str], list[InstalledPlugin]] = {}
        for candidate in self.candidates:
            if candidate.state != "blocked":
                claims.setdefault((candidate.kind, candidate.name.lower()), []).append(candidate)
        for same in claims.values():
            ours = next((c for c in same if c.is_ours), None)
            for candidate in same if len(same) > 1 else ():
                if candidate is not ours:
                    what = (
                        f"the name is {ours.label}'s"
                        if ours
                        else f"{' and '.join(c.label for c in same)} claim the same name"
                    )
                    fix = f"uninstall {candidate.distribution}" if ours else "uninstall one"
                    candidate.contested, candidate.state = True, "failed"
                    candidate.reason = (
                        f"{what}; {fix}, or --block {(candidate if ours else same[0]).label}"
                    )

    def of(self, kind: str) -> list[InstalledPlugin]:
        """Return the candidates of one kind."""
        return [c for c in self.candidates if c.kind == kind]

    # --- find ------------------------------------------------------------------------------------------------------------

    def find(self, kind: str, name: str) -> InstalledPlugin:
        """Return the one candidate of that kind and name; names are case-insensitive.

        Raises:
            UsageError: unknown, not installed, blocked, or claimed by two distributions.
        """
        hits = [c for c in self.of(kind) if c.name.lower() == name.lower()]
        if not hits:
            raise UsageError(self._missing(kind, name))
        left = [c for c in hits if c.state != "blocked"]
        if not left:
            raise UsageError(
                f"{hits[0].label} is blocked {hits[0].reason}. Fix: lift the block, or choose another {kind}."
            )
        found = next((c for c in left if not c.contested), left[0])
        if found.contested:
            what, _, fix = found.reason.partition("; ")
            raise UsageError(f"{kind} {name!r}: {what}. Fix: {fix}")
        return found

    def _missing(self, kind: str, name: str) -> str:
        installed = [c.name for c in self.of(kind)]
        key = (kind, name.lower())
        if key in KNOWN:
            return f"{kind} {name!r} is not installed. Fix: pip install {KNOWN[key]}"
        if key in NOT_SHIPPED:
            return f"there is no {kind} {name!r}: no geartrain distribution provides it. Installed: {', '.join(installed)}."
        if instead := hint(kind, key[1]):
            return f"there is no {kind} {name!r}. Fix: {instead}"
        other = next((c for c in self.candidates if c.name.lower() == name.lower()), None)
        if other:
            return f"{name!r} is no {kind} but belongs to --{other.kind}. Fix: --{other.kind} {other.name}"
        elsewhere = next((k for k, n in [*KNOWN, *NOT_SHIPPED] if n == name.lower()), None)
        if elsewhere:
            return f"{name!r} is no {kind} but belongs to --{elsewhere}. Fix: --{elsewhere} {name.lower()}"
        known = installed + [n for k, n in KNOWN if k == kind]
        return f"there is no {kind} {name!r}. {nearest(name, known)}"

    # --- load ------------------------------------------------------------------------------------------------------------

    def load(self, candidate: InstalledPlugin) -> Any:
        """Import a candidate's class; of a command, its function.

        Raises:
            UsageError: it needs another geartrain; the import failed, or gave something else; the cause is attached.
        """
        if canonical(candidate.distribution) != "geartrain" and (needed := _other_core(candidate)):
            reason = candidate.fail(
                f"it requires {needed}, and geartrain {__version__} is installed"
            )
            raise UsageError(
                f"{candidate.label}: {reason}. Fix: pip install '{needed}', or another version of {candidate.distribution}"
            )
        try:
            loaded = candidate.entry_point.load()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plugin may fail in any way, sys.exit included
            lacks_torch = isinstance(error, ModuleNotFoundError) and error.name == "torch"
            reason = candidate.fail(
                "torch is not installed" if lacks_torch else f"{type(error).__name__}: {error}"
            )
            # Never "pip install MODULE": a distribution of that name may be a stranger's.
            fix = f"pip install --force-reinstall {candidate.distribution}, or --block {candidate.label}"
            fix = "pip install torch (a build for your hardware)" if lacks_torch else fix
            raise UsageError(
                f"{candidate.label} could not be imported: {reason}. Fix: {fix}"
            ) from error
        wanted, fits = (
            ("function", callable) if candidate.kind == "command" else ("class", inspect.isclass)
        )
        if not fits(loaded):
            reason = candidate.fail(f"its entry point gives {loaded!r}, not a {wanted}")
            raise UsageError(
                f"{candidate.label}: {reason}. Fix: name a {wanted} in its [project.entry-points]"
            )
        return loaded

    def probe(self, candidate: InstalledPlugin) -> Any:
        """Import a candidate and, if it is an accelerator, ask if it can be used here. Set its state and reason.

        Returns:
            Its class if it can be used, else ``None``.
        """
        if candidate.state != "available":
            return None
        try:
            cls = self.load(candidate)
            reason = ask(cls) if candidate.kind == "accelerator" else None
        except UsageError as error:
            if candidate.state == "available":
                candidate.fail(str(error))
            return None
        if reason:
            candidate.state, candidate.reason = "unavailable", reason
            return None
        return cls

    def select(
        self, kind: str, name: str, options: Mapping[str, Any] | None = None, reason: str = ""
    ) -> LoadedPlugin:
        """Find, import and make one plugin with its options."""
        candidate = self.find(kind, name)
        cls = self.load(candidate)
        try:
            plugin = make(cls, candidate.label, options or {})
        except Exception as error:
            candidate.fail(f"its __init__ raised {type(error).__name__}: {error}")
            raise
        candidate.state, candidate.reason = "selected", reason
        choice = PluginInfo(candidate.name, kind, candidate.distribution, candidate.version, reason)
        given = dict(options or {})
        return LoadedPlugin(
            choice, plugin, given, partial(_selected_again, kind, candidate.name, given)
        )

    def adopt(self, kind: str, given: Any, reason: str) -> LoadedPlugin:
        """Return the part of a user's object or class; named as its entry point, if it has one.

        An object that is no plugin itself may have ``as_plugin()``, which returns its plugin.
        """
        plugin = make(given, given.__name__, {}) if inspect.isclass(given) else given
        cls = type(plugin)
        if hasattr(plugin, "as_plugin"):
            return LoadedPlugin(
                PluginInfo(cls.__name__, kind, None, None, reason), plugin.as_plugin()
            )
        for candidate in self.of(kind):
            if _names(candidate.entry_point, cls):
                candidate.state, candidate.reason = "selected", reason
                return LoadedPlugin(
                    PluginInfo(
                        candidate.name, kind, candidate.distribution, candidate.version, reason
                    ),
                    plugin,
                )
        name = plugin.__name__ if isinstance(plugin, ModuleType) else cls.__name__
        return LoadedPlugin(PluginInfo(name, kind, None, None, reason), plugin)


def _selected_again(kind: str, name: str, options: Mapping[str, Any]) -> Any:
    return Registry().select(kind, name, options).plugin


def _installed() -> list[InstalledPlugin]:
    """Return all installed plugins; the metadata are read again only after a folder of ``sys.path`` has changed."""
    global _scanned
    state = (entry_points, [(path, _changed_at(path)) for path in sys.path])
    if _scanned is None or _scanned[0] != state:
        _scanned = (state, _scan())
    return [InstalledPlugin(*found) for found in _scanned[1]]


def canonical(distribution: str) -> str:
    """Return a distribution's name in pip's spelling."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _other_core(candidate: InstalledPlugin) -> str | None:
    """Return the version of geartrain that a candidate's distribution requires, if it is not this one."""
    from packaging.requirements import (
        InvalidRequirement,
        Requirement,
    )  # not above: listing plugins need not pay for it

    for line in (candidate.entry_point.dist and candidate.entry_point.dist.requires) or ():
        try:
            needed = Requirement(line)
        except InvalidRequirement:
            continue  # geartrain doctor reports it
        asked = needed.marker is None or needed.marker.evaluate({"extra": ""})
        if (
            canonical(needed.name) == "geartrain"
            and asked
            and not needed.specifier.contains(__version__, prereleases=True)
        ):
            return f"geartrain{needed.specifier}"
    return None


def _changed_at(path: str) -> int | None:
    try:
        return os.stat(path or ".").st_mtime_ns
    except OSError:
        return None


def _scan() -> list[tuple[str, str, str, str, EntryPoint]]:
    """Read the facts of every plugin in one pass over the metadata, and those of each distribution once."""
    every = entry_points()
    named: dict[int, tuple[str, str]] = {}

    def found(kind: str, ep: EntryPoint) -> tuple[str, str, str, str, EntryPoint]:
        if id(ep.dist) not in named:
            named[id(ep.dist)] = (ep.dist.name, ep.dist.version) if ep.dist else ("?", "?")
        return (ep.name, kind, *named[id(ep.dist)], ep)

    return [
        found(kind, ep)
        for kind, group in GROUPS.items()
        for ep in sorted(
            (ep for ep in every if ep.group == group), key=lambda ep: (ep.name, ep.value)
        )
    ]


def _names(entry_point: EntryPoint, cls: type) -> bool:
    """True if an entry point names this class. Imports nothing."""
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
        if str(error).startswith(label):
            raise  # not from itself, which would be an endless chain of causes
        raise UsageError(f"{label}: {error}") from error
    except SystemExit as error:
        raise UsageError(
            f"{label}: its __init__ raised SystemExit: {error}. Fix: raise geartrain.UsageError there"
        ) from error
    except Exception as error:
        error.add_note(f"raised while {label} was created")
        raise
