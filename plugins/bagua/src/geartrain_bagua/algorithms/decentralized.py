"""Weights are averaged, not gradients; a rank steps from the average with gradients of the weights it had.

Decentralized parallel SGD: Lian et al. 2017, https://arxiv.org/abs/1705.09056
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from geartrain import Module, Plan, UsageError
from geartrain_bagua.algorithm import Context, Peers
from geartrain_bagua.algorithms.weights import OwnWeights, swap
from geartrain_bagua.channel import Job
from geartrain_bagua.hierarchy import across_nodes


class Decentralized(OwnWeights):
    """Average weights while forward and backward go on: ``x = mean(x) - lr * g(x)``, with ``g`` of the rank's own ``x``.

    The exchange starts once a step, before its first micro-batch, with the weights of that moment. After the last backward the average
    replaces the weights, then gradients are clipped and optimizers step; momentum stays the rank's own.

    Args:
        hierarchical: average inside each node first, then only each node's first rank exchanges with those of others. On one node
            that is the average over all.
        peer_selection_mode: ``"all"``: the mean over all ranks. ``"shift_one"``: the mean of two, with another partner each time; an
            even number of ranks, or of nodes where hierarchical; one process has none.
        communication_interval: average in the first step and every so many steps.

    Raises:
        UsageError: another mode, or an interval under 1.
    """

    _averages: list[Job]

    def __init__(
        self,
        hierarchical: bool = True,
        peer_selection_mode: str = "all",
        communication_interval: int = 1,
    ) -> None:
        super().__init__(hierarchical, communication_interval)
        if peer_selection_mode not in ("all", "shift_one"):
            raise UsageError(
                f"peer_selection_mode={peer_selection_mode!r} is unknown. Fix: 'all' or 'shift_one'"
            )
        self.peer_selection_mode = peer_selection_mode

    def check_plan(self, plan: Plan, module: Module | type[Module]) -> None:
        partners = plan.num_nodes if self.hierarchical else plan.processes
        if self.peer_selection_mode == "shift_one" and partners is not None and plan.processes != 1:
            _check_even(partners, self.hierarchical, plan)

    def set_up(self, context: Context) -> None:
        super().set_up(context)
        self._averages = []
        among = context.everyone if context.node is None else context.leaders
        if (
            self.peer_selection_mode == "shift_one"
            and among is not None
            and context.everyone.size > 1
        ):
            _check_even(among.size, self.hierarchical)

    def start_step(self) -> None:
        super().start_step()
        if self.due:
            exchange = partial(self._exchange, number=self.steps // self.communication_interval)
            for bucket in self.context.buckets:
                average = partial(across_nodes, self.context, bucket.take_weights(), True, exchange)
                self._averages.append(self.context.channel.submit(average))

    def end_backward(self) -> None:
        averages, self._averages = self._averages, []
        for bucket, average in zip(self.context.buckets, averages, strict=bool(averages)):
            average.result()
            bucket.give_weights()

    def _exchange(self, flat: torch.Tensor, among: Peers, number: int) -> None:
        if among.size == 1:  # nobody to exchange with
            return
        if self.peer_selection_mode == "all":
            dist.all_reduce(flat, group=among.group)
            flat.div_(among.size)
        else:
            other = partner(among, number)
            flat.add_(swap(among, flat, [other])[other]).div_(2)


def partner(among: Peers, number: int) -> int:
    """The rank with which this one averages in exchange ``number``, from 0: ranks of the lower half meet those of the upper in turn."""
    half = among.size // 2
    return (
        (number + among.rank) % half + half
        if among.rank < half
        else (among.rank - half - number) % half
    )


def _check_even(number: int, hierarchical: bool, plan: Plan | None = None) -> None:
    """Refuse an odd number of partners.

    Raises:
        UsageError: the number is odd.
    """
    if number % 2 == 0:
        return
    whose = "" if plan is None else f"{plan.strategy.label}: "
    one, several, fix = (
        ("node", "nodes", "hierarchical=False")
        if hierarchical
        else ("process", "processes", "an even number")
    )
    what = f"there is 1 {one}" if number == 1 else f"there are {number} {several}"
    raise UsageError(
        f"{whose}the algorithm 'decentralized' with peer_selection_mode='shift_one' makes pairs, and {what}. Fix: {fix}, or 'all'"
    )
