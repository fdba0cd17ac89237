"""Accelerators for types of devices that torch knows."""

from __future__ import annotations

from geartrain_devices._version import __version__
from geartrain_devices.accelerator import NPUAccelerator, TorchAccelerator, XPUAccelerator

__all__ = ["NPUAccelerator", "TorchAccelerator", "XPUAccelerator", "__version__"]
