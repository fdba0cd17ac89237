"""Seeds and determinism."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_everything(seed: int) -> int:
    """Seed Python's, NumPy's (where it is loaded) and torch's generators, on every device.

    DataLoader workers draw their seeds from torch's, so they follow.

    Args:
        seed: 0 to 2**32 - 1, NumPy's range.

    Returns:
        The seed.
    """
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    torch.manual_seed(seed)
    return seed


@contextmanager
def determinism(mode: bool | str) -> Iterator[None]:
    """Ask torch for deterministic algorithms while the context is open; ``"warn"`` only warns where there is none.

    https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    if not mode:
        yield
        return
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
    )
    # cuBLAS reads this when its first handle is made; without it deterministic mode raises on CUDA.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=mode == "warn")
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = before[2]
