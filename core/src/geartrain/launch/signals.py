"""Signals that end a run are errors, so that set-up is torn down."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from geartrain.launch.forks import handlers_not_inherited, is_forking

#: Signals that end a run; each would kill this process outright, or stay unheard while it is blocked.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: Seconds after which a signal that came in the middle of a fork is sent again.
_AGAIN = 0.05


class Interrupted(KeyboardInterrupt):
    """A signal asked the run to end. Set-up is torn down as after an error."""


@contextmanager
def raise_on_signals(
    signals: Sequence[signal.Signals] = SIGNALS,
    is_expected: Callable[[int], bool] = lambda number: False,
) -> Iterator[None]:
    """Let the signals that end a program raise :class:`Interrupted`, so that set-up is torn down.

    A handler of the program's own stays, and so does a signal that it ignores, as SIGHUP under nohup. In another thread than the main one
    nothing changes: Python allows handlers in that one only.

    Args:
        is_expected: True for the number of a signal that is to raise nothing, because the process is about to end already.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        if is_forking():  # Python drops an exception here: send the signal again, until it comes outside of a fork
            threading.Timer(_AGAIN, os.kill, (os.getpid(), number)).start()
        elif not is_expected(number):
            raise Interrupted(f"ended by {signal.Signals(number).name}")

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {
            number: own
            for number in signals
            if (own := signal.getsignal(number)) in (signal.SIG_DFL, signal.default_int_handler)
        }
    for number in before:
        signal.signal(number, interrupt)
    try:
        with handlers_not_inherited(before):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
