"""Ranks in a ring tell their neighbours how their weights changed, a byte an element.

Difference compression: Tang et al. 2018, https://arxiv.org/abs/1803.06443
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
    """What is known of a bucket's weights on this rank and on its neighbours; each ``[numel]``."""

    own: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor


class LowPrecisionDecentralized(OwnWeights):
    """After the optimizers, each bucket moves towards the mean of the rank and its two neighbours in the ring of ranks::

        d = x + left / 3 + right / 3 - 5 / 3 * own
        x = own = own + Q(d);  left += Q(d of the left one);  right += Q(d of the right one)

    ``Q`` is MinMaxUInt8 with the bucket as one chunk. All ranks decode the same bytes, so what a rank holds of its neighbour is, bit by
    bit, what the neighbour holds of itself. Of two ranks each is the other's left and right neighbour: its message then goes once.
    One rank alone trains as if there were no strategy.

    Args:
        hierarchical: average inside each node first; the ring is of each node's first rank, and its outcome is the node's. On one node the
            ring is of one, which is its own neighbour: the mean over its ranks moves by what a byte can tell, as it will on many nodes.
        communication_interval: exchange in the first step and every so many steps.

    Raises:
        UsageError: an interval under 1.
    """

    #: By bucket; empty on ranks that are not in the ring.
    replicas: Sequence[Replicas] = ()

    def __init__(self, hierarchical: bool = True, communication_interval: int = 1) -> None:
        super().__init__(hierarchical, communication_interval)

    def set_up(self, context: Context) -> None:
        if context.node is None or context.leaders is not None:
            weights = [
                bucket.take_weights(torch.empty_like(bucket.flat)) for bucket in context.buckets
            ]
            self.replicas = [Replicas(one, one.clone(), one.clone()) for one in weights]
        super().set_up(context)

    def end_step(self) -> None:
        if self.due:
            exchanges = []
            for bucket in self.context.buckets:
                exchange = partial(self._exchange, index=bucket.index)
                exchanges.append(
                    self.context.channel.submit(
                        partial(across_nodes, self.context, bucket.take_weights(), True, exchange)
                    )
                )
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
            {"own": one.own.clone(), "left": one.left.clone(), "right": one.right.clone()}
            for one in self.replicas
        ]
        return {**super().state_dict(), "replicas": replicas}

    def restore(self, state: dict[str, Any]) -> None:
        if len(state["replicas"]) != len(self.replicas):
            now, then = ("in the ring", "not") if self.replicas else ("not in the ring", "was")
            raise UsageError(
                f"this rank is {now} of nodes, and {then} when the checkpoint was saved. {SAME_AS_THEN.format('nodes')}"
            )
        super().restore(state)
        for known, kept in zip(self.replicas, state["replicas"], strict=True):
            known.own.copy_(kept["own"])
            known.left.copy_(kept["left"])
            known.right.copy_(kept["right"])
