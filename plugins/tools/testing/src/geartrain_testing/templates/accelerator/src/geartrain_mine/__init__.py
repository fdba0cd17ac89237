"""The accelerator ``mine`` for geartrain."""

from __future__ import annotations

from geartrain_mine.accelerator import MineAccelerator

__all__ = ["MineAccelerator"]
