"""The plugin ``profile`` for geartrain."""

from __future__ import annotations

from geartrain_monitor.profile.plugin import Profile

__all__ = ["Profile"]
