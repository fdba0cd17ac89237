"""A wait that does not end ends the run, and who did not come is named."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from geartrain import TrainingError
from geartrain_horovod import watchdog as module
from geartrain_horovod.installed import missing
from geartrain_horovod.watchdog import Board, Watchdog

needs_horovod = pytest.mark.skipif(missing() is not None, reason=str(missing()))
TIMEOUT = 1.0


@pytest.fixture(autouse=True)
def look_often(monkeypatch):
    monkeypatch.setattr(module, "_LOOKS", (0.05, 0.1))


@pytest.fixture
def board():
    """Horovod's own rendezvous server, as horovodrun and rank 0 run it."""
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    server = RendezvousHTTPServer(("127.0.0.1", 0), RendezvousHandler, 0)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    yield lambda: Board("127.0.0.1", server.server_address[1], "geartrain.1")
    server.shutdown()
    server.server_close()
    thread.join()


@contextmanager
def another(board, rank, wait=None, last=None, size=2):
    """Another rank, in a thread of this process."""
    ready, stop = threading.Event(), threading.Event()

    def work():
        dog = Watchdog(60.0, rank, size, board)
        if last is not None:
            with dog.watching(*last):
                pass
        with dog.watching(*wait) if wait is not None else threading.Lock():
            ready.set()
            stop.wait(60)
        dog.leave(lambda: None, False)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        ready.wait(10)
        yield stop
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive()


def poll(wait):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        wait.check()
        time.sleep(0.01)


def wait_for_ever(dog, what="all-reduce", name="net.weight"):
    """What it says when a wait does not end."""
    with dog.watching(what, name) as wait, pytest.raises(TrainingError) as raised:
        poll(wait)
    dog.leave(lambda: None, True)
    return str(raised.value)


def test_a_wait_that_lasts_too_long(capfd):
    began = time.monotonic()
    told = wait_for_ever(Watchdog(TIMEOUT, 3, 4))
    assert TIMEOUT < time.monotonic() - began < 20
    assert re.match(
        r"rank 3 has waited \d+ s for the others in all-reduce 'net\.weight' \(stall_timeout=1\)",
        told,
    )
    assert "which rank did not come cannot be told under this launcher" in told
    shown = capfd.readouterr().err
    assert told in shown
    assert "--- rank 3 is at ---" in shown
    assert "in poll" in shown


@needs_horovod
def test_a_rank_that_does_something_else(board, capfd):
    with another(board(), 1, ("all_gather", "other"), ("log_sync", "before")):
        told = wait_for_ever(Watchdog(TIMEOUT, 0, 2, board()))
    assert told.endswith("; rank 1 has not joined it: it is in all_gather 'other'")
    shown = capfd.readouterr().err
    assert "--- rank 1 is at ---" in shown
    assert "in work" in shown


@needs_horovod
def test_a_rank_that_does_nothing(board):
    with another(board(), 1, last=("log_sync", "before")):
        told = wait_for_ever(Watchdog(TIMEOUT, 0, 2, board()))
    assert told.endswith(
        "; rank 1 has not joined it: it is in no operation of Horovod; its last was log_sync 'before'"
    )


@needs_horovod
def test_a_rank_that_says_nothing_any_more(board):
    """As one that is stopped, or whose machine has gone."""
    note = board()
    note.put("1", json.dumps({"beat": 7, "in": None, "last": "all-reduce 'net.bias'", "stack": []}))
    with another(board(), 2, ("all-reduce", "net.weight"), size=3):
        told = wait_for_ever(Watchdog(3.0, 0, 3, board()))
    assert re.search(
        r"; rank 1 has not joined it and has said nothing for \d s \(it is stopped, or its machine or network has gone\)",
        told,
    )
    assert told.endswith("it was in no operation of Horovod; its last was all-reduce 'net.bias'")
    assert "rank 2" not in told


@needs_horovod
def test_a_rank_that_never_said_anything(board):
    told = wait_for_ever(Watchdog(3.0, 0, 2, board()))
    assert "rank 1 has not joined it, and has never said anything" in told


@needs_horovod
def test_all_wait(board):
    with another(board(), 1, ("all-reduce", "net.weight")):
        told = wait_for_ever(Watchdog(TIMEOUT, 0, 2, board()))
    assert "every rank waits in it" in told


def test_a_server_that_does_not_answer():
    """As that in rank 0, which is stopped: what it keeps is out of reach, and blames nobody."""
    with socket.socket() as listener:  # takes connections and says nothing
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        port = listener.getsockname()[1]
        dog = Watchdog(5.0, 1, 3, Board("127.0.0.1", port, "geartrain.1"))
        dog._heard = {
            0: ({"beat": 1, "in": "all-reduce 'net.weight'"}, time.monotonic() - 100),
            2: ({"beat": 1}, time.monotonic() - 100),
        }
        began = time.monotonic()
        told = wait_for_ever(dog)
    assert f"it hears nothing of the others: 127.0.0.1:{port} does not answer" in told
    assert "rank 0" not in told
    assert "rank 2" not in told
    assert time.monotonic() - began < 25


def test_waits_that_end_in_time_cost_microseconds():
    dog = Watchdog(600.0, 0)
    began = time.perf_counter()
    for _ in range(20_000):
        with dog.watching("all-reduce", "net.weight") as wait:
            wait.check()
    microseconds = (time.perf_counter() - began) / 20_000 * 1e6
    dog.leave(lambda: None, False)
    print(f"{microseconds:.2f} µs a wait")
    assert microseconds < 50


def test_many_waits_are_not_one_long_one():
    dog = Watchdog(0.6, 0)
    deadline = time.monotonic() + 2.5
    while time.monotonic() < deadline:
        with dog.watching("all-reduce", "x") as wait:
            time.sleep(0.1)
            wait.check()
    dog.leave(lambda: None, False)
    assert dog.verdict is None


def test_a_stopped_process_is_not_late_by_that(monkeypatch):
    """Where all ranks are stopped and go on, as by a scheduler that takes the machine back for a while."""
    dog = Watchdog(3.0, 0)
    now, clock = [0.0], time.monotonic
    monkeypatch.setattr(module.time, "monotonic", lambda: clock() + now[0])
    with dog.watching("all-reduce", "x") as wait:
        now[0] = 1000.0
        time.sleep(1.5)
        wait.check()
    dog.leave(lambda: None, False)


def test_0_watches_nothing():
    before = threading.active_count()
    dog = Watchdog(0, 0)
    with dog.watching("all-reduce", "x") as wait:
        wait.check()
    assert threading.active_count() == before
    dog.leave(lambda: None, False)


def test_no_thread_is_left():
    before = threading.active_count()
    Watchdog(600.0, 0).leave(lambda: None, False)
    assert threading.active_count() == before


def test_a_shutdown_that_comes_late_ends_nothing(monkeypatch):
    """The others were ended meanwhile, and the program goes on."""
    monkeypatch.setenv("GEARTRAIN_PATIENCE", "unwind=0.2,grace=0.5")
    ended, released = [], threading.Event()
    monkeypatch.setattr(module.os, "_exit", ended.append)
    Watchdog(600.0, 0).leave(lambda: released.wait(30), True)
    (last,) = [thread for thread in threading.enumerate() if thread.name == "geartrain-horovod-end"]
    released.set()
    last.join(30)
    assert ended == []


STUCK = """
import ctypes, sys
from geartrain_horovod import watchdog
dog = watchdog.Watchdog(0.5, 1)
sleep = ctypes.CDLL(None).sleep  # as a wait in C++: Python hears nothing there
"""


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (
            "with dog.watching('shutdown', ''): sleep(600)",
            "rank 1 does not come out of shutdown: its process is ended",
        ),
        # An error has ended the run; Horovod shuts down at the end of the program too, and hangs there.
        (
            "dog.leave(lambda: sleep(600), True); sleep(600)",
            "rank 1 cannot leave Horovod, whose other ranks hang: its process is ended",
        ),
    ],
)
def test_what_hangs_in_c_ends_with_its_process(code, told):
    patience = {"GEARTRAIN_PATIENCE": "unwind=0.5,grace=0.5"}
    done = subprocess.run(
        [sys.executable, "-c", STUCK + code],
        capture_output=True,
        text=True,
        timeout=110,
        env=os.environ | patience,
    )
    assert done.returncode == 1
    assert told in done.stderr
