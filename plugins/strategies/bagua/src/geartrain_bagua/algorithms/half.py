"""Average gradients in 16 bits during backward: half of the bytes."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist

from geartrain_bagua.algorithm import Algorithm
from geartrain_bagua.buckets import Bucket

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class HalfAllReduce(Algorithm):
    """Average gradients over all ranks in 16 bits.

    Args:
        dtype: ``"bf16"``, with float32's range and 8 bits of precision, or ``"fp16"``, with 11
            bits of precision, which overflows above 65,504.
    """

    reduces = "gradients"
    capabilities: ClassVar[dict[str, Any]] = {"convergence": 0.002}

    def __init__(self, dtype: Literal["bf16", "fp16"] = "bf16") -> None:
        self.dtype = dtype

    def reduce(self, bucket: Bucket) -> None:
        # Divide before the sum, which could overflow in 16 bits.
        half = (bucket.flat / self.context.everyone.size).to(_DTYPES[self.dtype])
        dist.all_reduce(half, group=self.context.everyone.group)
        bucket.flat.copy_(half)
