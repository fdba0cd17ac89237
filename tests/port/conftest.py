"""What the tests of ``geartrain port`` use of the command line."""

from command_line import command, folder, installed, write

__all__ = ["command", "folder", "installed", "write"]
