"""``from geartrain.accelerators import CUDAAccelerator``: classes and helpers of whatever is installed, found by entry points."""

from __future__ import annotations

from typing import Any

from geartrain.planning.lazy_exports import names, resolve

_HOMES = {"CUDAAccelerator": "cuda", "MPSAccelerator": "mps", "find_usable_cuda_devices": "cuda"}


def __getattr__(name: str) -> Any:
    return resolve("accelerator", __name__, name, _HOMES)


def __dir__() -> list[str]:
    return names("accelerator")
