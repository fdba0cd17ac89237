"""The accelerator ``tpu`` for geartrain."""

from __future__ import annotations

from geartrain_tpu._version import __version__
from geartrain_tpu.accelerator import TPUAccelerator

__all__ = ["TPUAccelerator", "__version__"]
