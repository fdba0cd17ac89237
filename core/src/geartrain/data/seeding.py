"""Seeds, and the state of random generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def seed_everything(seed: int) -> int:
    """Seed Python's, NumPy's (if it is loaded) and torch's generators, on every device.

    DataLoader workers draw their seeds from torch's generator.

    Args:
        seed: 0 to 2**32 - 1, NumPy's range.

    Returns:
        The seed.
    """
    seed_cpu(seed)
    torch.manual_seed(seed)
    return seed


def seed_cpu(seed: int) -> None:
    """Seed the generators of the CPU only: ``torch.manual_seed`` seeds devices too, in 0.5 ms."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    torch.default_generator.manual_seed(seed)


def random_state(device: torch.device, every: bool = False) -> dict[str, Any]:
    """Return the state of torch's, Python's, the device's, and loaded NumPy's global generators.

    Args:
        every: of every device of this kind that the process sees, instead of one.
    """
    version, numbers, gauss = random.getstate()
    python = [version, list(numbers), gauss]
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": python}
    if "numpy" in sys.modules:
        name, keys, *details = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, keys.tolist(), *details]
    if device.type != "cpu":
        state[device.type] = [get() for get, _ in _of_device(device, every)]
    return state


def set_random_state(device: torch.device, state: dict[str, Any]) -> None:
    """Restore the state of :func:`random_state`, except that of another kind of device."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in sys.modules and "numpy" in state:
        name, keys, *details = state["numpy"]
        numpy = sys.modules["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *details))
    kept = state.get(device.type, ())
    for (_, restore), numbers in zip(_of_device(device, len(kept) > 1), kept, strict=False):
        restore(numbers)


def _of_device(device: torch.device, every: bool) -> list[tuple[Any, Any]]:
    """Return what gets and what sets the state of a device's generator, or of every device's."""
    if device.type == "cpu":
        return []
    module: Any = torch.get_device_module(device)
    generators = getattr(module, "default_generators", ())
    if not generators and hasattr(module, "get_rng_state"):  # as torch.mps
        return [(module.get_rng_state, module.set_rng_state)]
    chosen = generators if every else generators[device.index or 0 :][:1]
    return [(generator.get_state, generator.set_state) for generator in chosen]


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Seed the global generators on the CPU in the block, and restore them afterwards."""
    before = random_state(torch.device("cpu"))
    seed_cpu(seed % 2**32)
    try:
        yield
    finally:
        set_random_state(torch.device("cpu"), before)
