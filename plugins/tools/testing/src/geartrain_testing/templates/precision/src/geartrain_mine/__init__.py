"""The precision ``mine`` for geartrain."""

from __future__ import annotations

from geartrain_mine.precision import MinePrecision

__all__ = ["MinePrecision"]
