"""Children that somebody stops: seen only after long enough, and only while they are."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from geartrain_parallel.patience import Patience
from geartrain_parallel.supervisor import Supervisor, is_stopped
from geartrain_testing.launching import until

PATIENCE, PERIOD = 15.0, 2.0
pytestmark = pytest.mark.skipif(
    not os.path.isdir("/proc/self"), reason="a process's state is read from /proc"
)


@pytest.fixture
def clock():
    """The seconds that this process has lived, as the test says."""
    return [1000.0]


@pytest.fixture
def watch(clock, child):
    rank = SimpleNamespace(number=1, pid=child.pid, poll=child.poll, error=lambda: None)
    return Supervisor([rank], Path(), Patience(stopped=PATIENCE), lambda: clock[0])


def test_looks_are_often_enough():
    assert [
        Supervisor([], Path(), Patience(stopped=seconds)).period for seconds in (PATIENCE, 1.0)
    ] == [PERIOD, 0.25]


@pytest.fixture
def child():
    started = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield started
    started.kill()
    started.communicate()


def send(child, number, state):
    child.send_signal(number)
    until(lambda: is_stopped(child.pid) is state, 20, f"{number.name} is heard")


def looks(watch, clock, seconds):
    """What is seen by looks every ``PERIOD``, for so long."""
    found = []
    for _ in range(int(seconds / PERIOD)):
        clock[0] += PERIOD
        watch.look()
        found.append(bool(watch.failures))
    return found


def test_one_that_is_stopped_for_long(watch, clock, child):
    assert not any(looks(watch, clock, 100))
    send(child, signal.SIGSTOP, True)
    assert looks(watch, clock, PATIENCE + 3 * PERIOD)[-2:] == [True, True]


def test_it_is_given_time(watch, clock, child):
    send(child, signal.SIGSTOP, True)
    assert not any(looks(watch, clock, PATIENCE - PERIOD))


def test_one_that_goes_on_begins_anew(watch, clock, child):
    for _ in range(3):
        send(child, signal.SIGSTOP, True)
        assert not any(looks(watch, clock, PATIENCE - PERIOD))
        send(child, signal.SIGCONT, False)
        assert not any(looks(watch, clock, PERIOD))


def test_time_in_which_this_process_was_suspended_too_does_not_count(watch, clock, child):
    send(child, signal.SIGSTOP, True)
    looks(watch, clock, PERIOD)
    clock[0] += 3600
    watch.look()
    assert watch.failures == []


def test_one_that_has_ended_is_not_stopped(watch, clock, child):
    child.communicate(b"\n")
    assert not any(looks(watch, clock, 2 * PATIENCE))
