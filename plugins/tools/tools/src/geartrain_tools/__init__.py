"""The commands ``geartrain ckpt``, ``doctor``, ``report`` and ``tune``, each in its package."""

from __future__ import annotations

from geartrain_tools._version import __version__

__all__ = ["__version__"]
