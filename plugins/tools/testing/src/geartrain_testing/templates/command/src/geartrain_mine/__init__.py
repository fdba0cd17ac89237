"""The command ``mine`` for geartrain."""

from __future__ import annotations

from geartrain_mine.command import command

__all__ = ["command"]
