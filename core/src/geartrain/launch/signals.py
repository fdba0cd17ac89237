"""Signals that end a run are errors, so that set-up is torn down."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from geartrain.launch.forks import call_before_forks, handlers_not_inherited, is_forking

#: Seconds after which a signal that arrived during a fork is sent again.
_AGAIN = 0.05


class Interrupted(KeyboardInterrupt):
    """A signal ends the run. Set-up is torn down as after an error."""

    signal_name = ""


@contextmanager
def raise_on_signals(
    signals: Sequence[signal.Signals],
    is_expected: Callable[[int], bool] = lambda number: False,
    before_fork: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Let the signals that end a program raise :class:`Interrupted`, so that set-up is torn down.

    The program's own handlers stay, and so do signals that it ignores, as SIGHUP under nohup.
    Outside the main thread nothing changes, because Python allows no handlers there.

    Args:
        signals: the signals.
        is_expected: True for a signal's number that must raise nothing, because the process ends.
        before_fork: called before each later fork of this process, in the thread that forks; until
            the fork is over, a signal raises nothing: Python would drop the exception.
    """
    if before_fork is not None:
        call_before_forks(before_fork)

    def interrupt(number: int, frame: FrameType | None) -> None:
        if is_forking():  # Python drops an exception here: send the signal again after the fork
            threading.Timer(_AGAIN, os.kill, (os.getpid(), number)).start()
        elif not is_expected(number):
            error = Interrupted(f"ended by {signal.Signals(number).name}")
            error.signal_name = signal.Signals(number).name
            raise error

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        defaults = (signal.SIG_DFL, signal.default_int_handler)
        handlers = {number: signal.getsignal(number) for number in signals}
        before = {number: handler for number, handler in handlers.items() if handler in defaults}
    for number in before:
        signal.signal(number, interrupt)
    try:
        with handlers_not_inherited(before):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
