"""The commands of geartrain's command line that train, explain and list; and the arguments of a command that has a target."""

from __future__ import annotations

from geartrain_cli._version import __version__

__all__ = ["__version__"]
