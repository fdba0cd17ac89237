"""Wait until another thread has reached a place in the code."""

import os
import signal
import sys
import threading
import time


def main_is_in(*functions):
    """Return whether the main thread is in these functions: each is below the one before it."""
    frame, remaining = sys._current_frames()[threading.main_thread().ident], list(functions)
    while frame is not None and remaining:
        if frame.f_code is remaining[-1].__code__:
            remaining.pop()
        frame = frame.f_back
    return not remaining


def until_main_is_in(*functions):
    """Return once the main thread is in these functions."""
    while not main_is_in(*functions):
        pass


def press_ctrl_c(functions, then):
    """Send SIGINT while the main thread is in ``functions``; return once it is in ``then``.

    Python 3.11 overlooks a signal that arrives just before it waits for a lock, until it has the
    lock: 36 of 3,000 under load. So the signal is sent again if nothing happens for a second.
    """
    until_main_is_in(*functions)
    os.kill(os.getpid(), signal.SIGINT)
    again = time.monotonic() + 1
    while not main_is_in(*then):
        if time.monotonic() > again and main_is_in(*functions):
            os.kill(os.getpid(), signal.SIGINT)
            again = time.monotonic() + 1
