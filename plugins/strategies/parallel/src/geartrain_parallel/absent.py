"""The weights of a module on a rank that has none."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch

#: Bytes from which a tensor gets memory that the system provides when it is written.
_LARGE = 2**20


def absent_weights(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor for a rank that has no weights, so that nobody takes it for some.

    All elements are NaN. A large one takes no memory, so its first is NaN and the others are 0.
    """
    size, can_be_nan = math.prod(shape) * dtype.itemsize, dtype.is_floating_point
    if size < _LARGE:
        value = torch.zeros(tuple(shape), dtype=dtype)
        return value.fill_(torch.nan) if can_be_nan else value
    memory = mmap.mmap(-1, size, access=mmap.ACCESS_COPY)  # of this process alone
    value = torch.frombuffer(memory, dtype=dtype).view(tuple(shape))
    if can_be_nan:
        value.view(-1)[0] = torch.nan
    return value
