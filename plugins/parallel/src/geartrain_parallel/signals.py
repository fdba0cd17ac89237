"""Signals that end a rank: heard once, and not while the rank is ending already."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager

from geartrain import plugin_api
from geartrain.plugin_api import SIGNALS, Interrupted
from geartrain_parallel.failures import is_connection
from geartrain_parallel.reports import ERROR_FILE, failed_at


def raise_on_signals(signals: Sequence[signal.Signals] = SIGNALS) -> AbstractContextManager[None]:
    """Let the signals that end a program raise ``Interrupted``, so that set-up is torn down.

    A handler of the program's own stays, and so does a signal that it ignores, as SIGHUP under nohup. In another thread than the main one
    nothing changes: Python allows handlers in that one only. A rank that another process has started ignores SIGTERM while it is ending.
    """
    return plugin_api.raise_on_signals(signals, _is_ending)


def _is_ending(number: int) -> bool:
    """True if this rank, which another process has started, is asked to end and is about to end already."""
    if number != signal.SIGTERM or ERROR_FILE not in os.environ:
        return False
    if failed_at() is not None:
        return True  # it is tearing down
    error = sys.exception()
    if isinstance(error, Interrupted):
        return (
            True  # Ctrl-C reaches ranks and starter at once, and the starter asks them to end, too
        )
    # It has just lost its peers. The signal came while it was in a collective and is handled only now: another error here would keep it
    # from tearing down.
    if error is None or not is_connection(str(error)):
        return False
    error.add_note("and then this rank was asked to end, by SIGTERM")
    return True
