"""Seeds and determinism."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def seed_everything(seed: int) -> int:
    """Seed Python's, NumPy's (if it is loaded) and torch's generators, on every device.

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


def random_state(device: torch.device, every: bool = False) -> dict[str, Any]:
    """Return the state of the global generators (torch's, Python's, NumPy's if it is loaded, the device's), as tensors and plain values.

    Args:
        every: of every device of this kind that the process sees, instead of one.
    """
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(numbers), gauss],
    }
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, keys.tolist(), *rest]
    if device.type == "cuda":
        state["cuda"] = (
            torch.cuda.get_rng_state_all() if every else [torch.cuda.get_rng_state(device)]
        )
    elif device.type == "mps":
        state["mps"] = torch.mps.get_rng_state()
    return state


def set_random_state(device: torch.device, state: dict[str, Any]) -> None:
    """Restore the state that :func:`random_state` returned; generators of another kind of device stay as they are."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in sys.modules and "numpy" in state:
        name, keys, *rest = state["numpy"]
        numpy = sys.modules["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    if device.type == "cuda" and "cuda" in state:
        several = len(state["cuda"]) > 1
        devices = (
            [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
            if several
            else [device]
        )
        for one, numbers in zip(devices, state["cuda"], strict=False):
            torch.cuda.set_rng_state(numbers, one)
    elif device.type == "mps" and "mps" in state:
        torch.mps.set_rng_state(state["mps"])


@contextmanager
def determinism(mode: bool | str) -> Iterator[None]:
    """Ask torch for deterministic algorithms while the context is open; ``"warn"`` only warns if an operation has none.

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
