"""Ranks in a ring send the changes of their weights to their neighbours, one byte per element.

Source: difference compression, Tang et al. 2018, https://arxiv.org/abs/1803.06443
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from geartrain import UsageError
from geartrain_bagua.algorithm import Context, Peers
from geartrain_bagua.algorithms.weights import SAME_AS_THEN, OwnWeights, swap
from geartrain_bagua.hierarchy import across_nodes
from geartrain_bagua.minmax_uint8 import compress, decompress


@dataclass(frozen=True, slots=True)
class Replicas:
    """Copies of a bucket's weights on this rank and on its two neighbours, each ``[numel]``."""

    own: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor


class LowPrecisionDecentralized(OwnWeights):
    """After the optimizers, move each bucket towards the mean of this rank and its two neighbours.

    In the ring of ranks::

        d = x + left / 3 + right / 3 - 5 / 3 * own
        x = own = own + Q(d)
        left += Q(d of the left neighbour);  right += Q(d of the right neighbour)

    ``Q`` is MinMaxUInt8 with the bucket as one chunk. All ranks decode the same bytes, so a rank's
    copy of its neighbour is equal, bit by bit, to the neighbour's copy of itself. In a ring of two,
    each rank is the other's left and right neighbour, and its message is sent once. A single rank
    trains as without a strategy.

    Args:
        hierarchical: average inside each node first. The ring has the first rank of each node, and
            all ranks of the node get its result. On one node the ring has one rank, which is its
            own neighbour: the mean over the node changes in steps of one byte, as on many nodes.
        communication_interval: steps between two exchanges; the first step always exchanges.

    Raises:
        UsageError: the interval is less than 1.

    Source:
        Tang et al. 2018, https://arxiv.org/abs/1803.06443; Bagua's
        ``LowPrecisionDecentralizedAlgorithm``.
    """

    #: One for each bucket; empty on ranks that are not in the ring.
    replicas: Sequence[Replicas] = ()

    def __init__(self, hierarchical: bool = True, communication_interval: int = 1) -> None:
        super().__init__(hierarchical, communication_interval)

    def set_up(self, context: Context) -> None:
        if context.node is None or context.leaders is not None:
            weights = [
                bucket.take_weights(torch.empty_like(bucket.flat)) for bucket in context.buckets
            ]
            self.replicas = [Replicas(weight, weight.clone(), weight.clone()) for weight in weights]
        super().set_up(context)

    def end_step(self) -> None:
        if self.due:
            exchanges = []
            for bucket in self.context.buckets:
                exchange = partial(self._exchange, index=bucket.index)
                weights = bucket.take_weights()
                work = partial(across_nodes, self.context, weights, True, exchange)
                exchanges.append(self.context.channel.submit(work))
            for bucket, job in zip(self.context.buckets, exchanges, strict=True):
                job.result()
                bucket.give_weights()
        super().end_step()

    @torch.no_grad()
    def _exchange(self, x: torch.Tensor, ring: Peers, index: int) -> None:
        known = self.replicas[index]
        x.add_(known.left, alpha=1 / 3).add_(known.right, alpha=1 / 3).sub_(known.own, alpha=5 / 3)
        message = compress(x.view(1, -1))
        left, right = (ring.rank - 1) % ring.size, (ring.rank + 1) % ring.size
        got = swap(ring, message, [left, right])
        known.left.add_(decompress(got[left]).view(-1))
        known.right.add_(decompress(got[right]).view(-1))
        x.copy_(known.own.add_(decompress(message).view(-1)))

    def state_dict(self) -> dict[str, Any]:
        replicas = [
            {
                "own": replica.own.clone(),
                "left": replica.left.clone(),
                "right": replica.right.clone(),
            }
            for replica in self.replicas
        ]
        return {**super().state_dict(), "replicas": replicas}

    def restore(self, state: dict[str, Any]) -> None:
        if len(state["replicas"]) != len(self.replicas):
            current, then = ("in the ring", "not") if self.replicas else ("not in the ring", "was")
            raise UsageError(
                f"this rank is {current} of nodes, and {then} when the checkpoint was saved. "
                f"{SAME_AS_THEN.format('nodes')}"
            )
        super().restore(state)
        for known, kept in zip(self.replicas, state["replicas"], strict=True):
            known.own.copy_(kept["own"])
            known.left.copy_(kept["left"])
            known.right.copy_(kept["right"])
