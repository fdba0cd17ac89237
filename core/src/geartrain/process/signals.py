"""Signals that end a run are errors, so that set-up is torn down."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from geartrain.process import is_connection

#: Where a worker writes its error, as torchelastic's workers do.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
#: Signals that end a run; each would kill this process outright, or stay unheard while it is blocked.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A signal asked the run to end. Set-up is torn down as after an error."""


@contextmanager
def hear_signals() -> Iterator[None]:
    """Let the signals that end a program raise :class:`Interrupted`, so that set-up is torn down."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGTERM and (os.path.exists(os.environ.get(ERROR_FILE, "")) or is_connection(str(sys.exception() or ""))):
        # This rank has failed, told so, and is tearing down; or it has just lost its peers, and is on its way there: asked to end while it
        # was in a collective, it hears so only now, and another error here would keep it from tearing down.
        return
    raise Interrupted(f"ended by {signal.Signals(number).name}")
