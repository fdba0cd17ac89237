"""Plugins for geartrain that measure a run: ``device_stats`` and ``profile``."""

from __future__ import annotations

from geartrain_monitor._version import __version__

__all__ = ["__version__"]
