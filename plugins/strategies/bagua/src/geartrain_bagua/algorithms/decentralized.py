"""Average weights, not gradients; update the average with the gradients of the old weights.

Source: decentralized parallel SGD, Lian et al. 2017, https://arxiv.org/abs/1705.09056
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
    """Average weights during forward and backward: ``x = mean(x) - lr * g(x)``.

    ``g`` is the gradient at the rank's own ``x``. The exchange starts once per step, before the
    first micro-batch, with the weights of that moment. After the last backward the average replaces
    the weights. Then gradients are clipped and optimizers step. Each rank keeps its own momentum.

    Args:
        hierarchical: average inside each node first; then only the first rank of each node
            communicates with other nodes. On one node this is the average over all ranks.
        peer_selection_mode: ``"all"``: the mean over all ranks. ``"shift_one"``: the mean of two
            ranks, with another partner each time. It needs an even number of ranks, or of nodes
            if ``hierarchical``. A single process has no partner and trains alone.
        communication_interval: steps between two averages; the first step always averages.

    Raises:
        UsageError: the mode is unknown, or the interval is less than 1.

    Source:
        Lian et al. 2017, https://arxiv.org/abs/1705.09056; Bagua's ``DecentralizedAlgorithm``.
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
                f"peer_selection_mode={peer_selection_mode!r} is unknown. "
                "Fix: use 'all' or 'shift_one'"
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
        pairs = self.peer_selection_mode == "shift_one" and context.everyone.size > 1
        if pairs and among is not None:
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
        if among.size == 1:  # no partner
            return
        if self.peer_selection_mode == "all":
            dist.all_reduce(flat, group=among.group)
            flat.div_(among.size)
        else:
            other = partner(among, number)
            flat.add_(swap(among, flat, [other])[other]).div_(2)


def partner(among: Peers, number: int) -> int:
    """Return the rank with which this rank averages in exchange ``number``, from 0.

    Each rank of the lower half is paired with each rank of the upper half in turn.
    """
    half = among.size // 2
    if among.rank < half:
        return (number + among.rank) % half + half
    return (among.rank - half - number) % half


def _check_even(number: int, hierarchical: bool, plan: Plan | None = None) -> None:
    """Raise ``UsageError`` for an odd number of partners."""
    if number % 2 == 0:
        return
    owner = "" if plan is None else f"{plan.strategy.label}: "
    one, several, hint = ("process", "processes", "use an even number of processes")
    if hierarchical:
        one, several, hint = ("node", "nodes", "use hierarchical=False")
    count = f"1 {one}" if number == 1 else f"{number} {several}"
    raise UsageError(
        f"{owner}the algorithm 'decentralized' with peer_selection_mode='shift_one' needs an even "
        f"number of {several}, not {count}. Fix: {hint}, or peer_selection_mode='all'"
    )
