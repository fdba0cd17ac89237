"""Fixtures of the command line for the tests of ``geartrain port``."""

from command_line import command, folder, installed, write

__all__ = ["command", "folder", "installed", "write"]
