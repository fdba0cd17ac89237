"""Stopped ranks (SIGSTOP) fail after some time, if they do not continue."""

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
    """The fake clock, in seconds."""
    return [1000.0]


@pytest.fixture
def watch(clock, child):
    rank = SimpleNamespace(number=1, pid=child.pid, poll=child.poll, error=lambda: None)
    return Supervisor([rank], Path(), Patience(stopped=PATIENCE), lambda: clock[0])


def test_checks_are_frequent_enough():
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
    until(lambda: is_stopped(child.pid) is state, 20, f"{number.name} has arrived")


def looks(watch, clock, seconds):
    """Check every ``PERIOD`` for some seconds; return for each check if it has found a failure."""
    found = []
    for _ in range(int(seconds / PERIOD)):
        clock[0] += PERIOD
        watch.look()
        found.append(bool(watch.failures))
    return found


def test_a_rank_that_is_stopped_for_long_fails(watch, clock, child):
    assert not any(looks(watch, clock, 100))
    send(child, signal.SIGSTOP, True)
    assert looks(watch, clock, PATIENCE + 3 * PERIOD)[-2:] == [True, True]


def test_the_time_starts_again_after_a_rank_continues(watch, clock, child):
    for _ in range(3):
        send(child, signal.SIGSTOP, True)
        assert not any(looks(watch, clock, PATIENCE - PERIOD))
        send(child, signal.SIGCONT, False)
        assert not any(looks(watch, clock, PERIOD))


def test_time_in_which_the_supervisor_is_suspended_does_not_count(watch, clock, child):
    send(child, signal.SIGSTOP, True)
    looks(watch, clock, PERIOD)
    clock[0] += 3600
    watch.look()
    assert watch.failures == []


def test_a_rank_that_has_ended_is_not_stopped(watch, clock, child):
    child.communicate(b"\n")
    assert not any(looks(watch, clock, 2 * PATIENCE))
