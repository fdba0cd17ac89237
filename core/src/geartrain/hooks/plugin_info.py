"""The identity of a selected plugin, as plans, hook tables and errors show it."""

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
    #: ``"core"``, ``"accelerator"``, ``"strategy"``, ``"precision"``, ``"plugin"`` or ``"default"``.
    kind: str
    #: The pip distribution it comes from; ``None`` for a user's object or file.
    distribution: str | None
    version: str | None
    #: Why it was selected.
    reason: str

    @property
    def label(self) -> str:
        """Its name in errors: ``distribution[name]``."""
        return f"{self.distribution}[{self.name}]" if self.distribution else self.name

    @property
    def is_core(self) -> bool:
        """True for a part of core, which every process makes from the plan."""
        return self.kind in ("core", "default")

    def as_dict(self) -> dict[str, Any]:
        """Return its entry in ``plan.json``."""
        return {
            "name": self.name,
            "distribution": self.distribution,
            "version": self.version,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True, eq=False)
class LoadedPlugin:
    """A selected plugin and its object, which is registered with the hooks.

    A pickle makes the object again if it can, and gives it its state, because the object may hold files or connections.
    """

    info: PluginInfo
    plugin: Any
    #: The options it was made with, as the user gave them.
    options: Mapping[str, Any] = field(default_factory=dict)
    #: Makes it again in another process, from its name or its file; ``None`` for a user's object, which must pickle itself.
    make_again: Callable[[], Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self.make_again is None:
            return LoadedPlugin, (self.info, self.plugin, self.options)
        return _made_again, (self.info, self.options, self.make_again, state_of(self.plugin))


def _made_again(
    info: PluginInfo, options: Mapping[str, Any], make_again: Callable[[], Any], state: Any
) -> LoadedPlugin:
    plugin = make_again()
    if state is not None:
        plugin.load_state_dict(state)
    return LoadedPlugin(info, plugin, options, make_again)


def state_of(plugin: Any) -> Any:
    """Return a plugin's ``state_dict()``, or ``None`` if it keeps no state."""
    return plugin.state_dict() if keeps_state(plugin) else None


def keeps_state(plugin: Any) -> bool:
    """True if a plugin has both ``state_dict`` and ``load_state_dict``."""
    return all(callable(getattr(plugin, name, None)) for name in ("state_dict", "load_state_dict"))
