"""Put a unit on the device with rank 0's weights, before it is sharded."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from geartrain import Run, UsageError


class Materializer:
    """Puts the units of a module on the device with rank 0's weights, before each is sharded.

    A submodule on the meta device is filled by its ``reset_parameters()``.

    Args:
        run: of this rank.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        #: A parameter on the meta device, and the one in its place: tied weights stay tied.
        self._filled: dict[nn.Parameter, nn.Parameter] = {}

    @torch.no_grad()
    def fill(self, unit: nn.Module) -> None:
        """Fill a unit, in the order of ``unit.modules()``, without parts that are sharded already.

        Raises:
            UsageError: a submodule on the meta device has no ``reset_parameters``, or that leaves a
                tensor unset.
        """
        for part in unit.modules():
            if any(tensor.is_meta for _, tensor in _own(part)):
                self._reset(part)
            for _, tensor in _own(part):
                tensor.data = tensor.data.to(self._run.device)
                if self._run.world.size > 1:
                    same = tensor.data.contiguous()
                    dist.broadcast(same, src=0)
                    tensor.data = same

    def _reset(self, part: nn.Module) -> None:
        label, kind = self._run.plan.strategy.label, type(part).__name__
        reset = getattr(part, "reset_parameters", getattr(part, "_reset_parameters", None))
        if not callable(reset):
            message = f"{label}: {kind} was made on the meta device and has no reset_parameters()"
            raise UsageError(f"{message}. Fix: define it; it sets the class's own tensors")
        # torch's to_empty() would untie weights.
        tied = {}
        for name, parameter in part._parameters.items():
            if parameter in self._filled:
                part._parameters[name] = self._filled[parameter]
                tied[name] = self._filled[parameter].clone()
            elif parameter is not None and parameter.is_meta:
                value = self._empty(parameter)
                filled = nn.Parameter(value, parameter.requires_grad)
                part._parameters[name] = self._filled[parameter] = filled
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                part._buffers[name] = self._empty(buffer)
        reset()
        for name, value in tied.items():  # the module that had it first has set it
            getattr(part, name).copy_(value)
        for name, tensor in _own(part):
            if tensor.is_floating_point() and bool(tensor.isnan().any()):
                message = f"{label}: {kind}.reset_parameters() does not set {name}"
                raise UsageError(f"{message}, which was made on the meta device. Fix: set it there")

    def _empty(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with NaN, so that one that is never set is found."""
        value = torch.zeros_like(tensor, device=self._run.device)
        return value.fill_(torch.nan) if value.is_floating_point() else value


def _own(part: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors that a module has itself, without shards."""
    for name, tensor in (*part._parameters.items(), *part._buffers.items()):
        if tensor is not None and not isinstance(tensor, DTensor):
            yield name, tensor
