"""``from geartrain.accelerators import CUDAAccelerator``: installed accelerators and helpers."""

from __future__ import annotations

from functools import partial

from geartrain.planning.lazy_exports import names, resolve

_HOMES = {"CUDAAccelerator": "cuda", "MPSAccelerator": "mps", "find_usable_cuda_devices": "cuda"}

__getattr__ = partial(resolve, "accelerator", __name__, homes=_HOMES)
__dir__ = partial(names, "accelerator")
