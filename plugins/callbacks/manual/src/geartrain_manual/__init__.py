"""The plugin ``manual_optimisation`` for geartrain: ``automatic_optimization = False``."""

from __future__ import annotations

from geartrain_manual._version import __version__
from geartrain_manual.optimisation import ManualOptimisation

__all__ = ["ManualOptimisation", "__version__"]
