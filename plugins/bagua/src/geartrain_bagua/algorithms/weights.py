"""What the algorithms share that exchange weights and not gradients: each rank has weights of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from geartrain import Plan, UsageError
from geartrain_bagua.algorithm import Algorithm, Context, Peers


class OwnWeights(Algorithm):
    """Ranks whose weights differ, and communicate every ``communication_interval`` steps, from the first on.

    What a checkpoint keeps as the model is rank 0's; ``state_dict`` has this rank's own, and a resumed run goes on with them. Validation
    is of each rank's own model: its metrics are means over ranks of different models. Where the precision is 16-mixed, each rank's scaler
    skips steps by itself: communication does not depend on it, so ranks still match.
    """

    capabilities: ClassVar[dict[str, Any]] = {"identical_weights": False, "convergence": 0.1}

    def __init__(self, hierarchical: bool, communication_interval: int) -> None:
        if communication_interval < 1:
            raise UsageError(f"communication_interval={communication_interval!r} must be 1 or more steps.")
        self.hierarchical = hierarchical
        self.communication_interval = communication_interval
        #: Training steps done.
        self.steps = 0
        self._loaded: dict[str, Any] | None = None

    @property
    def due(self) -> bool:
        """Whether this step communicates."""
        return self.steps % self.communication_interval == 0 and self.context.everyone.size > 1

    def set_up(self, context: Context) -> None:
        super().set_up(context)
        state, self._loaded = self._loaded, None
        if state is None:
            return
        self.steps = state["steps"]
        if state["ranks"] == context.everyone.size:  # of other ranks' weights nothing follows here: training starts from rank 0's
            self.restore(state)

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what ``state_dict`` kept of as many ranks as there are now."""
        for bucket, weights in zip(self.context.buckets, state["weights"], strict=True):
            bucket.give_weights(weights)

    def end_step(self) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        own = [bucket.take_weights(torch.empty_like(bucket.flat)) for bucket in self.context.buckets]
        return {"steps": self.steps, "ranks": self.context.everyone.size, "weights": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state


def talking(context: Context) -> Peers | None:
    """Who exchanges weights: all ranks, or each node's first where the algorithm is hierarchical; ``None`` on the other ranks."""
    return context.everyone if context.node is None else context.leaders


def sum_in_node(context: Context, flat: torch.Tensor) -> int:
    """Put the sum over the node's ranks into ``flat`` of its first; how many ranks that is. Nothing where not hierarchical."""
    if context.node is None:
        return 1
    dist.reduce(flat, dst=context.node.ranks[0], group=context.node.group)
    return context.node.size


def share_in_node(context: Context, flat: torch.Tensor) -> None:
    """Give the node's ranks what its first has in ``flat``. Nothing where not hierarchical."""
    if context.node is not None:
        dist.broadcast(flat, src=context.node.ranks[0], group=context.node.group)


def swap(peers: Peers, message: torch.Tensor, others: Iterable[int]) -> dict[int, torch.Tensor]:
    """Send ``message`` to other ranks of the group and get theirs, by rank. A rank that is named twice gets it once; oneself is answered
    by oneself."""
    got = {other: message if other == peers.rank else torch.empty_like(message) for other in others}
    away = {other: answer for other, answer in got.items() if other != peers.rank}
    if away:
        calls = [dist.P2POp(dist.isend, message, peers.ranks[other], peers.group) for other in away]
        calls += [dist.P2POp(dist.irecv, answer, peers.ranks[other], peers.group) for other, answer in away.items()]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
    return got


def check_even(number: int, hierarchical: bool, plan: Plan | None = None) -> None:
    """Refuse an odd number of partners.

    Raises:
        UsageError: the number is odd.
    """
    if number % 2 == 0:
        return
    whose = "bagua" if plan is None else plan.strategy.label
    what = f"{number} node{'s' * (number > 1)}" if hierarchical else f"{number} process{'es' * (number > 1)}"
    fix = "hierarchical=False with an even number of processes" if hierarchical else "an even number"
    raise UsageError(f"{whose}: peer_selection_mode='shift_one' makes pairs, and there are {what}. Fix: {fix}, or 'all'")
