"""Where the program started, read when geartrain is first imported: other ranks are started there."""

import os

try:
    DIRECTORY = os.getcwd()
except FileNotFoundError:  # it was removed under us; nothing can be relaunched there, and nothing else depends on it
    DIRECTORY = os.sep
