"""Fixtures of the command line for the tests of ``geartrain tune``."""

from command_line import command, folder, installed, refused, write

__all__ = ["command", "folder", "installed", "refused", "write"]
