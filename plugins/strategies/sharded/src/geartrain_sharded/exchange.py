"""The gathers and reductions of units, on which ranks agree."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from geartrain.parallel import CollectiveOrder


class Exchange:
    """The gather of a unit's parameters, or the reduction of its gradients.

    Args:
        order: of the run.
        name: to show.
        group: used instead of the default process group.
    """

    def __init__(self, order: CollectiveOrder, name: str, group: dist.ProcessGroup | None) -> None:
        self._order, self._name, self._group = order, name, group

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Any,
        input_tensor: Any,
        group: dist.ProcessGroup,
        async_op: bool = False,
        **reduction: Any,
    ) -> Any:
        """Gather; or reduce and scatter, if torch passes an ``op``."""
        self._order.expect(self._name)
        if reduction:
            call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        else:
            call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        group = self._group if self._group and group is dist.group.WORLD else group
        return call(output_tensor, input_tensor, group=group, async_op=async_op, **reduction)
