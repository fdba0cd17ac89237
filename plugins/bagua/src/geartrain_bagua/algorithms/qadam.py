"""Adam whose momentum travels in 8 bits, once its variance has settled.

1-bit Adam: Tang et al. 2021, https://arxiv.org/abs/2102.02888; here, as in Bagua, in 8 bits and without error feedback.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist

from geartrain import Module, Plan, UsageError
from geartrain_bagua.algorithm import Algorithm, Context, Peers
from geartrain_bagua.buckets import Bucket
from geartrain_bagua.compression import eight_bit_mean
from geartrain_bagua.hierarchy import across_nodes
from geartrain_bagua.qadam_optimizer import QAdamOptimizer


class QAdam(Algorithm):
    """While ``QAdamOptimizer`` warms up, average gradients over all ranks in full precision; then each rank mixes its own into the
    momentum, and that is averaged in 8 bits.

    Args:
        hierarchical: in full precision inside each node, and in 8 bits among nodes alone.
    """

    reduces = "gradients"
    pads: ClassVar[bool] = True
    capabilities: ClassVar[dict[str, Any]] = {"convergence": 0.01}

    def __init__(self, hierarchical: bool = True) -> None:
        self.hierarchical = hierarchical

    def check_plan(self, plan: Plan, module: Module | type[Module]) -> None:
        # Both would be done to the momentum, which is mixed during backward.
        if plan.precision.name == "16-mixed":
            raise UsageError(
                f"{plan.strategy.label}: the algorithm 'qadam' mixes gradients into the momentum before they are unscaled. "
                "Fix: precision='bf16-mixed', or another algorithm"
            )
        if plan.options.gradient_clip_val is not None:
            raise UsageError(
                f"{plan.strategy.label}: the algorithm 'qadam' mixes gradients into the momentum before they are clipped. "
                "Fix: no gradient_clip_val, or another algorithm"
            )

    def set_up(self, context: Context) -> None:
        super().set_up(context)
        run = context.run
        if len(run.optimizers) != 1 or not isinstance(run.optimizers[0], QAdamOptimizer):
            found = ", ".join(type(optimizer).__name__ for optimizer in run.optimizers) or "none"
            raise UsageError(
                f"the algorithm 'qadam' needs exactly one optimizer, a QAdamOptimizer, and configure_optimizers gave {found}. "
                "Fix: from geartrain.strategies import QAdamOptimizer"
            )
        if len(run.schedulers) > 1:
            raise UsageError(
                f"the algorithm 'qadam' goes with one scheduler at most, and there are {len(run.schedulers)}. Fix: one"
            )
        self._optimizer = run.optimizers[0]
        self._optimizer.momentum_is_mixed = True
        self._group_of = {
            parameter: group
            for group in self._optimizer.param_groups
            for parameter in group["params"]
        }

    def reduce(self, bucket: Bucket) -> None:
        if not self._optimizer.is_warm:
            across_nodes(self.context, bucket.flat, True, self._all_reduce)
            return
        self._mix(bucket)
        across_nodes(self.context, bucket.flat, True, eight_bit_mean)

    def close(self, failed: bool) -> None:
        self._optimizer.momentum_is_mixed = False

    @torch.no_grad()
    def _mix(self, bucket: Bucket) -> None:
        """Let ``bucket.flat`` be this rank's momentum: the one that all ranks have, with this rank's gradients."""
        for view, parameter in zip(bucket.views, bucket.parameters, strict=True):
            if (group := self._group_of.get(parameter)) is not None:
                self._optimizer.mix(parameter, group, view)

    def _all_reduce(self, flat: torch.Tensor, among: Peers) -> None:
        dist.all_reduce(flat.div_(among.size), group=among.group)
