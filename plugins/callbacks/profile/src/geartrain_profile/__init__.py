"""The plugin ``profile`` for geartrain."""

from __future__ import annotations

from geartrain_profile._version import __version__
from geartrain_profile.plugin import Profile

__all__ = ["Profile", "__version__"]
