"""Signals that end a run of one process."""

import os
import signal
import threading

import pytest
from small_models import Net, fit

from geartrain.launch.signals import Interrupted, raise_on_signals

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def ended_by(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_an_error_that_names_it_and_handlers_are_restored(number):
    before = signal.getsignal(number)
    with raise_on_signals(SIGNALS), pytest.raises(Interrupted, match=f"ended by {number.name}"):
        ended_by(number)
    assert signal.getsignal(number) is before


def test_a_hangup_that_is_ignored_stays_so():
    """nohup ignores it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with raise_on_signals(SIGNALS):
            ended_by(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_handler_of_the_program_stays():
    """A program may save, or requeue its job, in its own handler."""
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with raise_on_signals(SIGNALS):
            ended_by(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_thread_changes_nothing():
    def other():
        with raise_on_signals(SIGNALS):
            handlers.append(signal.getsignal(signal.SIGTERM))

    handlers = []
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGTERM)]


def test_a_run_of_one_process_is_torn_down_after_sigterm():
    class Ends(Net):
        def training_step(self, batch, batch_idx):
            ended_by(signal.SIGTERM)
            return super().training_step(batch, batch_idx)

        def teardown(self, stage):
            down.append(stage)

    down = []
    with pytest.raises(Interrupted, match="SIGTERM"):
        fit(Ends())
    assert down == ["fit"]
