"""The command ``geartrain report``: one HTML page about one or several runs."""

from __future__ import annotations

from geartrain_report._version import __version__

__all__ = ["__version__"]
