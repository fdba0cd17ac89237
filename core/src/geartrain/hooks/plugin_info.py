"""The identity of a selected plugin, for plans, hook tables and errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: kind -> entry-point group.
GROUPS = {
    "accelerator": "geartrain.accelerators",
    "strategy": "geartrain.strategies",
    "precision": "geartrain.precisions",
    "plugin": "geartrain.plugins",
    "command": "geartrain.commands",
}


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """One selected accelerator, strategy, precision or plugin."""

    #: The name that the user types.
    name: str
    #: ``"core"``, ``"accelerator"``, ``"strategy"``, ``"precision"``, ``"plugin"``, ``"default"``.
    kind: str
    #: Its pip distribution; ``None`` for a user's object or file.
    distribution: str | None
    version: str | None
    #: The reason of the selection.
    reason: str

    @property
    def label(self) -> str:
        """The name in errors: ``distribution[name]``."""
        return f"{self.distribution}[{self.name}]" if self.distribution else self.name

    @property
    def is_core(self) -> bool:
        """True for a part of core, which every process makes from the plan."""
        return self.kind in ("core", "default")

    def as_dict(self) -> dict[str, Any]:
        """Return the entry in ``plan.json``."""
        names = ("name", "distribution", "version", "reason")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, eq=False)
class LoadedPlugin:
    """A selected plugin and its object, which is registered with the hooks.

    A pickle does not contain the object, which may hold files or connections: another process makes
    it again, with its ``state_dict()``. A user's object must pickle itself.
    """

    info: PluginInfo
    plugin: Any
    #: The options of its ``__init__`` that the user gave.
    options: Mapping[str, Any] = field(default_factory=dict)
    #: Makes the object again, from its name or its file; ``None`` for a user's object.
    recreate: Callable[[], Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self.recreate is None:
            return LoadedPlugin, (self.info, self.plugin, self.options)
        return _recreated, (self.info, self.options, self.recreate, self.state())

    def state(self) -> Any:
        """Return the object's ``state_dict()``, or ``None`` if it keeps no state."""
        return self.plugin.state_dict() if keeps_state(self.plugin) else None


def _recreated(
    info: PluginInfo, options: Mapping[str, Any], recreate: Callable[[], Any], state: Any
) -> LoadedPlugin:
    plugin = recreate()
    if state is not None:
        plugin.load_state_dict(state)
    return LoadedPlugin(info, plugin, options, recreate)


def keeps_state(plugin: Any) -> bool:
    """True if a plugin has both ``state_dict`` and ``load_state_dict``."""
    return all(callable(getattr(plugin, name, None)) for name in ("state_dict", "load_state_dict"))
