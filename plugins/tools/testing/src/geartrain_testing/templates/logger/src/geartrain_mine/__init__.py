"""The logger ``mine`` for geartrain."""

from __future__ import annotations

from geartrain_mine.logger import MineLogger

__all__ = ["MineLogger"]
