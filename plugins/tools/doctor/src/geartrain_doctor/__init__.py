"""The command ``geartrain doctor``."""

from __future__ import annotations

from geartrain_doctor._version import __version__

__all__ = ["__version__"]
