"""The plugin ``device_stats`` for geartrain."""

from __future__ import annotations

from geartrain_device_stats._version import __version__
from geartrain_device_stats.plugin import DeviceStats

__all__ = ["DeviceStats", "__version__"]
