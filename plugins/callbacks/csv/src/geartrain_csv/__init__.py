"""The logger ``csv`` for geartrain."""

from __future__ import annotations

from geartrain_csv._version import __version__
from geartrain_csv.logger import CSVLogger

__all__ = ["CSVLogger", "__version__"]
