"""Gradients are averaged over all ranks during backward, in full precision: what DDP and Horovod do too."""

from __future__ import annotations

from typing import ClassVar

import torch.distributed as dist

from geartrain_bagua.algorithm import Algorithm
from geartrain_bagua.buckets import Bucket


class GradientAllReduce(Algorithm):
    """Average gradients over all ranks.

    Args:
        hierarchical: reduce inside each node first, then among nodes.
        average: the mean over ranks; otherwise the sum.
    """

    reduces: str | None = "gradients"
    averages_gradients: ClassVar[bool] = True

    def __init__(self, hierarchical: bool = False, average: bool = True) -> None:
        self.hierarchical = hierarchical
        self.average = average

    def reduce(self, bucket: Bucket) -> None:
        if self.average:
            bucket.flat.div_(self.context.everyone.size)  # first: 16 bits could not hold the sum
        dist.all_reduce(bucket.flat, group=self.context.everyone.group)
