"""Weights are averaged, not gradients; a rank steps from the average with gradients of the weights it had.

Decentralized parallel SGD: Lian et al. 2017, https://arxiv.org/abs/1705.09056
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial

import torch.distributed as dist

from geartrain import Module, Plan, UsageError
from geartrain_bagua.algorithm import Context, Peers
from geartrain_bagua.algorithms.weights import OwnWeights, check_even, share_in_node, sum_in_node, swap, talking
from geartrain_bagua.buckets import Bucket


class Decentralized(OwnWeights):
    """Average weights while forward and backward go on: ``x = mean(x) - lr * g(x)``, with ``g`` of the rank's own ``x``.

    The exchange starts once a step, before its first micro-batch, with the weights of that moment. After the last backward the average
    replaces the weights, then gradients are clipped and optimizers step; momentum stays the rank's own.

    Args:
        hierarchical: average inside each node first, then only each node's first rank exchanges with those of others. On one node
            that is the average over all.
        peer_selection_mode: ``"all"``: the mean over all ranks. ``"shift_one"``: the mean of two, with another partner each time; an
            even number of ranks, or of nodes where hierarchical.
        communication_interval: average in the first step and every so many steps.

    Raises:
        UsageError: another mode, or an interval under 1.
    """

    def __init__(self, hierarchical: bool = True, peer_selection_mode: str = "all", communication_interval: int = 1) -> None:
        super().__init__(hierarchical, communication_interval)
        if peer_selection_mode not in ("all", "shift_one"):
            raise UsageError(f"peer_selection_mode={peer_selection_mode!r} is unknown. Fix: 'all' or 'shift_one'")
        self.peer_selection_mode = peer_selection_mode
        self._averages: list[Future[None]] = []

    def check_plan(self, plan: Plan, module: Module | type[Module]) -> None:
        partners = plan.num_nodes if self.hierarchical else plan.processes
        if self.peer_selection_mode == "shift_one" and partners is not None:
            check_even(partners, self.hierarchical, plan)

    def set_up(self, context: Context) -> None:
        if context.run.closure:
            raise UsageError(
                "bagua: algorithm='decentralized' replaces the weights between backward and step, and an optimizer that needs a closure, "
                "such as LBFGS, goes to and fro between them. Fix: another optimizer, or another algorithm"
            )
        super().set_up(context)
        peers = talking(context)
        if self.peer_selection_mode == "shift_one" and peers is not None:
            check_even(peers.size, self.hierarchical)

    def start_step(self) -> None:
        if not self.due:
            return
        for bucket in self.context.buckets:
            bucket.take_weights()
            self._averages.append(self.context.channel.submit(partial(self._average, bucket, self.steps)))

    def end_backward(self) -> None:
        averages, self._averages = self._averages, []
        for bucket, average in zip(self.context.buckets, averages, strict=bool(averages)):
            average.result()
            bucket.give_weights()

    def _average(self, bucket: Bucket, step: int) -> None:
        flat, peers = bucket.flat, talking(self.context)
        together = sum_in_node(self.context, flat)
        if peers is not None:
            if self.peer_selection_mode == "all":
                dist.all_reduce(flat, group=peers.group)
                flat.div_(self.context.everyone.size)
            else:
                flat.div_(together)
                other = partner(peers, step // self.communication_interval)
                flat.add_(swap(peers, flat, [other])[other]).div_(2)
        share_in_node(self.context, flat)


def partner(peers: Peers, exchange: int) -> int:
    """The rank with which this one averages in the given exchange, from 0: ranks of the lower half meet those of the upper in turn."""
    half = peers.size // 2
    return (exchange + peers.rank) % half + half if peers.rank < half else (peers.rank - half - exchange) % half
