"""How ``geartrain.strategies`` and ``geartrain.accelerators`` find names in whatever is installed."""

from __future__ import annotations

from typing import Any

from importlib_metadata import EntryPoint, entry_points

from geartrain.registry import GROUPS, KNOWN


def resolve(kind: str, module: str, attribute: str, homes: dict[str, str]) -> Any:
    """What ``from <module> import <attribute>`` gives: a class that an installed entry point names, or a helper beside it.

    Args:
        kind: ``"strategy"`` or ``"accelerator"``.
        homes: names that geartrain's own distributions provide -> the plugin's name.

    Raises:
        ImportError: a known name whose distribution is not installed, which ends in the ``pip install`` line, or one of Lightning's,
            which ends in what to write.
        AttributeError: an unknown name.
    """
    installed = entry_points(group=GROUPS[kind])
    for entry_point in installed:
        if _attribute(entry_point) == attribute:
            return entry_point.load()
    if attribute in homes:
        # A helper of the plugin's module that is no entry point itself, as find_usable_cuda_devices is.
        for entry_point in installed:
            if entry_point.name == homes[attribute]:
                return getattr(__import__(entry_point.module, fromlist=[attribute]), attribute)
        distribution = KNOWN[kind, homes[attribute]]
        raise ImportError(f"{module}.{attribute} is not installed. Fix: pip install {distribution}", name=distribution)
    from geartrain.porting.names import known

    if answer := known(f"{module.rpartition('.')[2]}.{attribute}"):
        raise ImportError(f"{module} has no {attribute!r}{answer}", name=module)
    have = ", ".join(names(kind))
    raise AttributeError(f"{module} has no {attribute!r}. Installed: {have}")


def names(kind: str) -> list[str]:
    """The class names that are installed."""
    return sorted({name for name in map(_attribute, entry_points(group=GROUPS[kind])) if name})


def _attribute(entry_point: EntryPoint) -> str:
    """The class that an entry point names; empty where its value is malformed, which is its author's business."""
    try:
        return str(entry_point.attr or "")
    except (AttributeError, ValueError):
        return ""
