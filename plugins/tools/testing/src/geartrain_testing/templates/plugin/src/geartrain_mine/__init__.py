"""The plugin ``mine`` for geartrain."""

from __future__ import annotations

from geartrain_mine.norm import MinePlugin

__all__ = ["MinePlugin"]
