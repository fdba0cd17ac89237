"""Find state that a step method sets on the replicas, which are discarded after each batch."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from geartrain.plugin_api import warn
from geartrain_callbacks.parts.split import is_plain

#: The dicts in which nn.Module keeps its attributes.
_STORES = ("_parameters", "_buffers", "_modules")
#: Path of the user's module in a replica.
_PREFIX = "step.module."


class Watch:
    """A record of the replicas' attributes, which finds attributes and buffers that changed.

    No value is read from a device: attributes are compared by identity, buffers by torch's count of
    in-place changes.

    Args:
        replicas: one per part.
        kept: ids of modules that all replicas share; their changes are kept, so they are ignored.
    """

    def __init__(self, replicas: Sequence[nn.Module], kept: Container[int] = ()) -> None:
        found = [
            [(name, module) for name, module in replica.named_modules() if id(module) not in kept]
            for replica in replicas
        ]
        self._modules = [
            [(name, module, _held(module)) for name, module in modules] for modules in found
        ]
        # The first replica has the module's buffers, so in-place changes of them are kept.
        self._buffers = [
            (f"{path}.{name}" if path else name, buffer, buffer._version)
            for modules in found[1:]
            for path, module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def warn(self, method: str, label: str, warned: set[str]) -> None:
        """Warn about lost changes, once per name.

        Args:
            method: the step method that ran.
            label: the strategy, for messages.
            warned: names of earlier warnings; new ones are added.
        """
        lost = _new(self._lost(), warned)
        if lost:
            warn(
                f"{label}: {_some(lost)} was set on a replica in {method} and is lost: each batch "
                "gets new replicas. Fix: return the value and store it in a *_step_end or another "
                "hook of the module, or use --strategy ddp"
            )
        changed = _new(self._changed(), warned)
        if changed:
            warn(
                f"{label}: {method} changed the buffers {_some(changed)} on every replica. "
                "The first replica's are kept and the others' are lost, so running statistics have "
                "seen the first part of each batch only. "
                "Fix: --strategy ddp, or a layer without such buffers"
            )

    def _changed(self) -> Iterator[str]:
        for name, buffer, version in self._buffers:
            if buffer._version != version:
                yield name
                module, _, attribute = name.rpartition(".")
                # torch's batch_norm also changes its statistics, but does not count that.
                if attribute == "num_batches_tracked":
                    yield from (f"{module}.running_mean", f"{module}.running_var")

    def _lost(self) -> Iterator[str]:
        for modules in self._modules:
            for name, module, before in modules:
                after = _held(module)
                path = f"{name}." if name else ""
                yield from (
                    path + key
                    for key in before.keys() | after.keys()
                    if not _same(before.get(key, ...), after.get(key, ...))
                )


def _held(module: nn.Module) -> dict[str, Any]:
    """Return every attribute, parameter, buffer and submodule of a module by name."""
    held = {name: value for name, value in vars(module).items() if name not in _STORES}
    for store in _STORES:
        held |= vars(module)[store]
    return held


def _same(before: Any, after: Any) -> bool:
    return before is after or (
        is_plain(before)
        and type(before) is type(after)
        and not isinstance(before, torch.Tensor)
        and before == after
    )


def _new(names: Iterable[str], warned: set[str]) -> list[str]:
    found = sorted({name.removeprefix(_PREFIX) for name in names} - warned)
    warned.update(found)
    return found


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
