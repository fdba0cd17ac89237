"""Average gradients over all ranks during backward, in full precision, as DDP and Horovod do."""

from __future__ import annotations

import torch
import torch.distributed as dist

from geartrain_bagua.algorithm import Algorithm, Peers
from geartrain_bagua.buckets import Bucket
from geartrain_bagua.hierarchy import across_nodes


class GradientAllReduce(Algorithm):
    """Average gradients over all ranks.

    Args:
        hierarchical: reduce inside each node first, then between nodes.
        average: use the mean over ranks; if False, the sum.

    Source:
        Bagua's ``GradientAllReduceAlgorithm``.
    """

    reduces = "gradients"

    def __init__(self, hierarchical: bool = False, average: bool = True) -> None:
        self.hierarchical = hierarchical
        self.average = average
        # In this case the strategy's ``average_gradients`` computes the same.
        self.averages_gradients = average and not hierarchical

    def reduce(self, bucket: Bucket) -> None:
        across_nodes(self.context, bucket.flat, self.average, self._all_reduce)

    def _all_reduce(self, flat: torch.Tensor, among: Peers) -> None:
        if self.average:
            flat.div_(among.size)  # before the sum, which could overflow in 16 bits
        dist.all_reduce(flat, group=among.group)
