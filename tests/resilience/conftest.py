"""The fixtures of commands that these tests use, with every distribution installed."""

from command_line import command, folder, installed, refused

__all__ = ["command", "folder", "installed", "refused"]
