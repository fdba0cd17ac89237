"""The strategy ``mine`` for geartrain."""

from __future__ import annotations

from geartrain_mine.strategy import MineStrategy

__all__ = ["MineStrategy"]
