"""Where the command that started this program can be run again."""

from __future__ import annotations

import os


def _current() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed, so nothing can be run again there
        return os.sep


#: The directory at the first import of geartrain: the command's relative paths are from it.
START_DIRECTORY = _current()
