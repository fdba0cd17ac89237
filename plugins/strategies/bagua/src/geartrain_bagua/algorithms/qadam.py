"""Adam that averages its momentum in 8 bits, after a warm-up that fixes the variance.

Source: 1-bit Adam, Tang et al. 2021, https://arxiv.org/abs/2102.02888; here, as in Bagua, with 8
bits and without error feedback.
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
    """Average gradients in full precision during the warm-up, then momenta in 8 bits.

    The warm-up is that of ``QAdamOptimizer``. After it, each rank mixes its own gradients into the
    momentum, and the ranks average the result.

    Args:
        hierarchical: use full precision inside each node and 8 bits only between nodes.

    Source:
        Tang et al. 2021, https://arxiv.org/abs/2102.02888; Bagua's ``QAdamAlgorithm``.
    """

    reduces = "gradients"
    pads: ClassVar[bool] = True
    # The weights of losses scale gradients after their reduction, and so the momentum.
    capabilities: ClassVar[dict[str, Any]] = {"convergence": 0.01, "weighted_loss": False}

    def __init__(self, hierarchical: bool = True) -> None:
        self.hierarchical = hierarchical

    def check_plan(self, plan: Plan, module: Module | type[Module]) -> None:
        # Gradients are mixed in during backward: unscaling or clipping would change the momentum.
        mixes = f"{plan.strategy.label}: the algorithm 'qadam' mixes gradients into the momentum"
        if plan.precision.name == "16-mixed":
            raise UsageError(
                f"{mixes} before they are unscaled. "
                "Fix: precision='bf16-mixed', or another algorithm"
            )
        if plan.options.gradient_clip_val is not None:
            raise UsageError(
                f"{mixes} before they are clipped. "
                "Fix: remove gradient_clip_val, or use another algorithm"
            )

    def set_up(self, context: Context) -> None:
        super().set_up(context)
        run = context.run
        if len(run.optimizers) != 1 or not isinstance(run.optimizers[0], QAdamOptimizer):
            found = ", ".join(type(optimizer).__name__ for optimizer in run.optimizers) or "none"
            raise UsageError(
                "the algorithm 'qadam' needs exactly one optimizer, a QAdamOptimizer, but "
                f"configure_optimizers returned {found}. "
                "Fix: return one geartrain.strategies.QAdamOptimizer"
            )
        if len(run.schedulers) > 1:
            raise UsageError(
                "the algorithm 'qadam' supports one scheduler at most, but configure_optimizers "
                f"returned {len(run.schedulers)}. Fix: return one"
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
        """Replace the gradients in ``bucket.flat`` by the momentum with this rank's gradients."""
        for view, parameter in zip(bucket.views, bucket.parameters, strict=True):
            if (group := self._group_of.get(parameter)) is not None:
                self._optimizer.mix(parameter, group, view)

    def _all_reduce(self, flat: torch.Tensor, among: Peers) -> None:
        dist.all_reduce(flat.div_(among.size), group=among.group)
