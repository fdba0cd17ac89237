"""Remote storage through fsspec: the plugin ``remote``, and checkpoints that are read by URL."""

from __future__ import annotations

from geartrain_remote._version import __version__

__all__ = ["__version__"]
