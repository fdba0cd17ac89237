"""How ``geartrain.strategies`` and ``geartrain.accelerators`` find names in whatever is installed."""

from __future__ import annotations

from typing import Any

from importlib_metadata import entry_points

from geartrain.registry import GROUPS, KNOWN


def resolve(kind: str, module: str, attribute: str, homes: dict[str, str]) -> Any:
    """What ``from <module> import <attribute>`` gives: a class that an installed entry point names, or a helper beside it.

    Args:
        kind: ``"strategy"`` or ``"accelerator"``.
        homes: names that geartrain's own distributions provide -> the plugin's name.

    Raises:
        ImportError: a known name whose distribution is not installed; ends in the ``pip install`` line.
        AttributeError: an unknown name.
    """
    installed = entry_points(group=GROUPS[kind])
    for entry_point in installed:
        if entry_point.attr == attribute:
            return entry_point.load()
    if attribute in homes:
        # A helper of the plugin's module that is no entry point itself, as find_usable_cuda_devices is.
        for entry_point in installed:
            if entry_point.name == homes[attribute]:
                return getattr(__import__(entry_point.module, fromlist=[attribute]), attribute)
        distribution = KNOWN[kind, homes[attribute]]
        raise ImportError(f"{module}.{attribute} is not installed. Fix: pip install {distribution}", name=distribution)
    have = ", ".join(sorted(entry_point.attr for entry_point in installed))
    raise AttributeError(f"{module} has no {attribute!r}. Installed: {have}")


def names(kind: str) -> list[str]:
    """The class names that are installed."""
    return sorted(entry_point.attr for entry_point in entry_points(group=GROUPS[kind]))
