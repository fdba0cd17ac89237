"""The plugin ``device_stats`` for geartrain."""

from __future__ import annotations

from geartrain_monitor.device_stats.plugin import DeviceStats

__all__ = ["DeviceStats"]
