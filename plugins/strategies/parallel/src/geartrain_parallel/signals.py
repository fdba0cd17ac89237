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
    error = sys.exception()
    # Ctrl-C reaches ranks and starter at the same time, and the starter then sends SIGTERM, too.
    if hasattr(error, "signal_name"):
        return True
    # The rank has just lost its peers. The signal arrived during a collective, and Python handles
    # it only now. Another error here would prevent teardown.
    if error is None or not is_connection(str(error)):
        return False
    error.add_note("and then this rank was asked to end, by SIGTERM")
    return True
