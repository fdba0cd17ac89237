"""Signals that end a rank: each raises once, and not while the rank already ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager

from geartrain import plugin_api
from geartrain_parallel.failures import is_connection
from geartrain_parallel.forks import before_fork
from geartrain_parallel.reports import ERROR_FILE, failed_at

#: Signals that end a rank; without a handler each would kill it without tear-down.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_NOTE = "and then this rank was asked to end, by SIGTERM"


def raise_on_signals(signals: Sequence[signal.Signals] = SIGNALS) -> AbstractContextManager[None]:
    """Make the signals that end a program raise ``Interrupted``, so that teardown runs.

    The program's own handlers stay. Signals that it ignores stay ignored, as SIGHUP under nohup.
    Outside the main thread nothing changes, because Python allows handlers only there. A rank that
    another process has started ignores SIGTERM while it ends.
    """
    return plugin_api.raise_on_signals(signals, _is_ending, before_fork)


def _is_ending(number: int) -> bool:
    """True for SIGTERM to a rank that another process has started and that already ends."""
    if number != signal.SIGTERM or ERROR_FILE not in os.environ:
        return False
    if failed_at() is not None:
        return True  # it is in teardown
    # Ctrl-C reaches ranks and starter at the same time, and the starter then sends SIGTERM, too.
    errors = _handled()
    if any(hasattr(error, "signal_name") for error in errors):
        return True
    # The rank has just lost its peers. The signal arrived during a collective, and Python handles
    # it only now; or a loader worker got it, too. Another error here would prevent teardown.
    lost = next((error for error in errors if is_connection(str(error))), None)
    if lost is not None and _NOTE not in getattr(lost, "__notes__", ()):
        lost.add_note(_NOTE)
    return lost is not None


def _handled() -> list[BaseException]:
    """Return the error that is being handled, and those during whose handling it was raised."""
    errors: list[BaseException] = []
    error = sys.exception()
    while error is not None and error not in errors:  # a user's code may make a cycle of contexts
        errors.append(error)
        error = error.__context__
    return errors
