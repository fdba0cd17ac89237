"""Gradients are averaged over all ranks during backward, in full precision: what DDP and Horovod do too."""

from __future__ import annotations

import torch
import torch.distributed as dist

from geartrain_bagua.algorithm import Algorithm, Peers
from geartrain_bagua.buckets import Bucket
from geartrain_bagua.hierarchy import across_nodes


class GradientAllReduce(Algorithm):
    """Average gradients over all ranks.

    Args:
        hierarchical: reduce inside each node first, then among nodes.
        average: the mean over ranks; otherwise the sum.
    """

    reduces = "gradients"

    def __init__(self, hierarchical: bool = False, average: bool = True) -> None:
        self.hierarchical = hierarchical
        self.average = average
        self.averages_gradients = (
            average and not hierarchical
        )  # then ``average_gradients`` of the strategy is the same

    def reduce(self, bucket: Bucket) -> None:
        across_nodes(self.context, bucket.flat, self.average, self._all_reduce)

    def _all_reduce(self, flat: torch.Tensor, among: Peers) -> None:
        if self.average:
            flat.div_(among.size)  # first: 16 bits could not hold the sum
        dist.all_reduce(flat, group=among.group)
