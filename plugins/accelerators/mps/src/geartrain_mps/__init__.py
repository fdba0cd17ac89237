"""The accelerator ``mps`` for geartrain."""

from __future__ import annotations

from geartrain_mps._version import __version__
from geartrain_mps.accelerator import MPSAccelerator

__all__ = ["MPSAccelerator", "__version__"]
