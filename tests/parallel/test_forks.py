"""Forks of a rank wait until it is safe; children keep no pipe of a rank and die with it."""

import multiprocessing
import os
import select
import signal
import sys
import threading
import time

import pytest

from geartrain.launch.signals import Interrupted
from geartrain_parallel import forks
from geartrain_parallel.signals import raise_on_signals

forks.guard_forks()


def fork():
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    return child


def test_a_fork_waits_for_the_threads_of_the_process_group(monkeypatch):
    waited = []
    monkeypatch.setattr(forks, "_settle", lambda: waited.append(threading.current_thread()))
    with raise_on_signals():
        fork().join(10)
    assert waited == [threading.main_thread()]


def test_a_signal_during_the_wait_of_a_fork_ends_the_run(monkeypatch):
    monkeypatch.setattr(forks, "_settle", lambda: os.kill(os.getpid(), signal.SIGTERM))

    def start_and_wait():
        fork()
        time.sleep(10)

    with raise_on_signals(), pytest.raises(Interrupted, match="ended by SIGTERM"):
        start_and_wait()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_forked_child_holds_no_copy_of_a_watchers_pipe():
    reading, writing = os.pipe()
    leave = multiprocessing.get_context("fork").Event()
    child = multiprocessing.get_context("fork").Process(target=leave.wait, args=(20,))
    with forks.not_inherited(writing):
        child.start()
    assert select.select([reading], [], [], 5)[0], (
        "a child holds the writing end, so that its reader never sees the end"
    )
    leave.set()
    child.join(10)
    os.close(reading)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_child_of_a_killed_rank_dies():
    reading, writing = os.pipe()
    if (rank := os.fork()) == 0:
        with raise_on_signals():
            if child := os.fork():
                os.write(writing, str(child).encode())
            time.sleep(60)
        os._exit(0)
    child = int(os.read(reading, 20))
    ended = os.pidfd_open(child)
    try:
        os.kill(rank, signal.SIGKILL)
        os.waitpid(rank, 0)
        assert multiprocessing.connection.wait([ended], 10)
    finally:
        os.close(ended)
        os.close(reading)
        os.close(writing)
