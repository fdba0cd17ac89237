"""What the tests of ``geartrain tune`` use of the command line."""

from command_line import command, folder, installed, refused, write

__all__ = ["command", "folder", "installed", "refused", "write"]
