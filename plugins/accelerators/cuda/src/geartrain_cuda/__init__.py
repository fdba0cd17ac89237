"""The accelerator ``cuda`` for geartrain."""

from geartrain_cuda._version import __version__
from geartrain_cuda.accelerator import CUDAAccelerator
from geartrain_cuda.usable import find_usable_cuda_devices

__all__ = ["CUDAAccelerator", "__version__", "find_usable_cuda_devices"]
