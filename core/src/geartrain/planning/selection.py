"""Select devices, strategy and precision, with reasons. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from geartrain.errors import UsageError
from geartrain.errors.distributions import import_from
from geartrain.errors.known import KNOWN
from geartrain.hooks.manager import Hooks
from geartrain.hooks.plugin_info import LoadedPlugin
from geartrain.launch.cluster import detect
from geartrain.planning.devices import parse_devices
from geartrain.planning.registry import Registry

#: Short forms of precisions, as in Lightning: ``16`` is mixed, because float16 weights train badly.
_PRECISIONS = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}


def select_devices(
    accelerator: LoadedPlugin, devices: Any, assume: Mapping[str, int]
) -> tuple[int, ...]:
    """Return device indices on each node.

    The accelerator's ``select_devices`` may change them: cuda's ``auto_select`` takes free devices.
    """
    name, plugin = accelerator.info.name, accelerator.plugin
    available = assume[name] if name in assume else plugin.device_count()
    indexed = getattr(plugin, "indexed", True)
    indices = parse_devices(devices, accelerator=name, available=available, indexed=indexed)
    if name not in assume and hasattr(plugin, "select_devices"):
        if not indexed:
            message = f"{accelerator.info.label}: indexed = False and select_devices"
            raise UsageError(f"{message} contradict each other. Fix: take out one")
        selected = plugin.select_devices(devices, indices)
        indices = parse_devices(selected, accelerator=name, available=available)
    return tuple(indices)


# --- strategy -------------------------------------------------------------------------------------


def select_strategy(
    registry: Registry,
    given: Any,
    options: Mapping[str, Any],
    devices: tuple[int, ...],
    num_nodes: int,
) -> tuple[LoadedPlugin, dict[str, str]]:
    """Return the strategy, and the others with the reason against each.

    ``"auto"`` decides by metadata, and imports only the selected strategy.
    """
    if not isinstance(given, str):
        return registry.adopt("strategy", given, "given as an object"), {}
    if given.lower() != "auto":
        return registry.select("strategy", given, options, f"--strategy {given}"), {}
    if len(devices) == 1 and num_nodes == 1:
        part = registry.select("strategy", "single", options, "'auto': one device needs no other")
        return part, _others(registry, "one device needs no strategy of several")
    # ddp starts ranks by running the command again, unless a launcher has started them.
    installed, stuck = registry.of("strategy"), None
    has_ddp = any(candidate.name == "ddp" for candidate in installed)
    if has_ddp and detect() is None:
        rerunning = import_from("geartrain_parallel.rerun_command", "the start of ranks by ddp")
        stuck = rerunning.reason_not_rerunnable()
    known = [name for kind, name in KNOWN if kind == "strategy"] if num_nodes == 1 else []
    preferred = [*([] if stuck else ["ddp"]), "ddp_spawn", *(n for n in known if n != "ddp")]
    asked = f"{len(devices)} devices on {num_nodes} node(s)"
    for name in preferred:
        if any(c.name == name and c.state == "available" for c in installed):
            reason = f"'auto': the best installed one for {asked}"
            reason += f", where {stuck} for ddp" if stuck else ""
            part = registry.select("strategy", name, options, reason)
            return part, _others(registry, f"{name} is preferred")
    needed = f"{asked} need a strategy of several processes"
    if stuck:
        raise UsageError(
            f"{needed}. ddp would run this program's command again, and {stuck}. Fix: pip install "
            "geartrain-spawn (or geartrain-dp), put the program in a file, or devices=1"
        )
    raise UsageError(f"{needed}: none is installed. Fix: pip install geartrain-ddp, or devices=1")


def _others(registry: Registry, reason: str) -> dict[str, str]:
    """Return the strategies that are not selected: label -> its own reason, or this one."""
    others = [c for c in registry.of("strategy") if c.state != "selected"]
    return {
        c.label: f"{c.state}: {c.reason}" if c.reason else f"{c.state}, but {reason}"
        for c in others
    }


# --- precision ------------------------------------------------------------------------------------


def select_precision(registry: Registry, given: Any) -> LoadedPlugin:
    """Return the precision.

    Args:
        given: a name, a short form (``16`` and ``"bf16"`` are mixed, ``32`` and ``64`` true), or an
            object with hookimpls.

    Raises:
        UsageError: nothing installed has that name, or the object has no hookimpls.
    """
    if Hooks.has_hookimpls(given):
        return registry.adopt("precision", given, "given as an object")
    name = _PRECISIONS.get(str(given).lower(), str(given))
    known, lower = [candidate.name for candidate in registry.of("precision")], name.lower()
    if ("precision", lower) not in KNOWN and lower not in map(str.lower, known):
        hint = f"use one of {', '.join(known)}; in short {', '.join(_PRECISIONS)}"
        raise UsageError(f"precision={given!r} is not known. Fix: {hint}")
    reason = f"--precision {given}" if given != "32-true" else "the default"
    return registry.select("precision", name, {}, reason)
