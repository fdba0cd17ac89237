"""Process groups of the communication thread: all ranks, one node's ranks, one rank per node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from geartrain import Run, UsageError
from geartrain_bagua.algorithm import Context, Peers


def peers(ranks: Sequence[int], timeout: timedelta) -> Peers | None:
    """Create a group of ``ranks``; return ``None`` on other ranks. Every rank must call this."""
    group = dist.new_group(list(ranks), timeout=timeout)
    rank = dist.get_rank()
    if rank not in ranks:
        return None
    return Peers(group, list(ranks).index(rank), len(ranks), tuple(ranks))


def node_peers(run: Run, timeout: timedelta) -> tuple[Peers, Peers | None]:
    """Return the ranks of this node, and the first ranks of all nodes (``None`` on other ranks).

    Raises:
        UsageError: nodes have different numbers of ranks, so the mean of their means is wrong.
    """
    table = run.hooks.log_sync(
        run=run, values=torch.tensor([run.world.node_rank], dtype=torch.float64)
    )
    nodes: dict[float, list[int]] = {}
    for rank, (node,) in enumerate(table.tolist()):
        nodes.setdefault(node, []).append(rank)
    counts = [len(ranks) for ranks in nodes.values()]
    if len(set(counts)) > 1:
        raise UsageError(
            f"hierarchical=True needs equally many ranks on each node, not {counts}. "
            "Fix: hierarchical=False"
        )
    # Every rank must take part in the creation of each group.
    found = [peers(ranks, timeout) for ranks in nodes.values()]
    leaders = peers([ranks[0] for ranks in nodes.values()], timeout)
    return next(node for node in found if node is not None), leaders


def across_nodes(
    context: Context, flat: torch.Tensor, average: bool, work: Callable[[torch.Tensor, Peers], None]
) -> None:
    """Replace ``flat`` by the mean (or sum) over all ranks, in place, in the communication thread.

    If the algorithm is hierarchical, reduce inside each node, call ``work`` on the first rank of
    each node, and broadcast the result inside the node. Otherwise call ``work`` on all ranks.

    Args:
        context: the algorithm's context.
        flat: the tensor to reduce.
        average: use the mean over ranks; if False, the sum.
        work: reduces ``flat`` among the ranks of its second argument, in place.
    """
    node = context.node
    if node is None or node.size == 1:  # with one rank per node, every rank is a first rank
        work(flat, context.everyone)
        return
    if average:
        flat.div_(node.size)  # before the sum, which could overflow in 16 bits
    dist.reduce(flat, node.ranks[0], group=node.group)
    if context.leaders is not None:
        work(flat, context.leaders)
    dist.broadcast(flat, node.ranks[0], group=node.group)
