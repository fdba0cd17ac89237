"""Process groups of the communication thread: all ranks, those of a node, and one of each node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from geartrain import Run, UsageError
from geartrain_bagua.algorithm import Context, Peers


def peers(ranks: Sequence[int], timeout: timedelta) -> Peers | None:
    """A new group of some ranks; every rank calls this, with the same ones. ``None`` on a rank that is not among them."""
    group = dist.new_group(list(ranks), timeout=timeout)
    here = dist.get_rank()
    if here not in ranks:
        return None
    return Peers(group, list(ranks).index(here), len(ranks), tuple(ranks))


def node_peers(run: Run, timeout: timedelta) -> tuple[Peers, Peers | None]:
    """The ranks of this node, and each node's first one, which is ``None`` on the others.

    Raises:
        UsageError: nodes with unequal numbers of ranks, whose means could not be averaged.
    """
    table = run.hooks.log_sync(
        run=run, values=torch.tensor([run.world.node_rank], dtype=torch.float64)
    )
    nodes: dict[float, list[int]] = {}
    for rank, (node,) in enumerate(table.tolist()):
        nodes.setdefault(node, []).append(rank)
    if len({len(ranks) for ranks in nodes.values()}) > 1:
        raise UsageError(
            f"hierarchical=True needs equally many ranks on each node, not {[len(r) for r in nodes.values()]}. Fix: hierarchical=False"
        )
    found = [
        peers(ranks, timeout) for ranks in nodes.values()
    ]  # every rank takes part in making each
    leaders = peers([ranks[0] for ranks in nodes.values()], timeout)
    return next(node for node in found if node is not None), leaders


def across_nodes(
    context: Context, flat: torch.Tensor, average: bool, work: Callable[[torch.Tensor, Peers], None]
) -> None:
    """Let ``work`` make ``flat`` the mean (or sum) over ranks, in place: over all of them, or where the algorithm is hierarchical over
    each node's first ranks, of what each node has; all get the result. In the communication thread.

    Args:
        work: called with ``flat`` and those that it is to work among.
    """
    node = context.node
    if node is None or node.size == 1:  # alone on a node, every rank is its first one
        work(flat, context.everyone)
        return
    if average:
        flat.div_(node.size)  # first: 16 bits could not hold the sum
    dist.reduce(flat, node.ranks[0], group=node.group)
    if context.leaders is not None:
        work(flat, context.leaders)
    dist.broadcast(flat, node.ranks[0], group=node.group)
