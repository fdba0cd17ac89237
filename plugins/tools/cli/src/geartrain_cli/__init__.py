"""The command line: commands that train, explain and list; arguments of commands with a target."""

from __future__ import annotations

from geartrain_cli._version import __version__
from geartrain_cli.command_line import cli, main

__all__ = ["__version__", "cli", "main"]
