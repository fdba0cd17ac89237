"""The gathers and reductions of units, on which ranks agree."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from geartrain.parallel import CollectiveOrder


class _Exchange:
    """A collective of a unit.

    Args:
        order: of the run.
        unit: the unit's name.
        group: used instead of the default process group.
    """

    def __init__(self, order: CollectiveOrder, unit: str, group: dist.ProcessGroup | None) -> None:
        self._order, self._unit, self._group = order, unit, group

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def _in(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        return self._group if self._group and group is dist.group.WORLD else group


class Gather(_Exchange):
    """The gather of a unit's parameters."""

    def __call__(
        self,
        output_tensor: Any,
        input_tensor: Any,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        self._order.expect(f"the gather of {self._unit}")
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return gather(output_tensor, input_tensor, group=self._in(group), async_op=async_op)


class Reduction(_Exchange):
    """The reduction of a unit's gradients."""

    def __call__(
        self,
        output_tensor: Any,
        input_tensor: Any,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self._order.expect(f"the reduction of {self._unit}")
        reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return reduce(output_tensor, input_tensor, op=op, group=self._in(group), async_op=async_op)
