"""Fixtures of the command line for the tests of ``geartrain verify``."""

from command_line import command, folder, installed, refused

__all__ = ["command", "folder", "installed", "refused"]
