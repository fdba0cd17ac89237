"""A wait without end makes the watchdog end the run and name the missing rank."""

import ctypes
import json
import re
import socket
import threading
import time
from contextlib import contextmanager

import pytest
from several_ranks import run

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
    """Horovod's rendezvous server, as horovodrun and rank 0 run it."""
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
    """Run another rank in a thread of this process."""
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


def error_of_a_stall(dog, what="all-reduce", name="net.weight"):
    """Return the error of a wait without end."""
    with dog.watching(what, name) as wait, pytest.raises(TrainingError) as raised:
        poll(wait)
    dog.leave(lambda: None, True)
    return str(raised.value)


def test_a_wait_that_lasts_too_long(capfd):
    began = time.monotonic()
    error = error_of_a_stall(Watchdog(TIMEOUT, 3, 4))
    assert TIMEOUT < time.monotonic() - began < 20
    assert re.match(
        r"rank 3 has waited \d+ s for the others in all-reduce 'net\.weight' \(stall_timeout=1\)",
        error,
    )
    assert "the missing rank is unknown, because ranks cannot report under this launcher" in error
    shown = capfd.readouterr().err
    assert error in shown
    assert "--- rank 3 is at ---" in shown
    assert "in poll" in shown


@needs_horovod
def test_a_rank_that_does_something_else(board, capfd):
    with another(board(), 1, ("all_gather", "other"), ("log_sync", "before")):
        error = error_of_a_stall(Watchdog(TIMEOUT, 0, 2, board()))
    assert error.endswith("; rank 1 has not joined it: it is in all_gather 'other'")
    shown = capfd.readouterr().err
    assert "--- rank 1 is at ---" in shown
    assert "in work" in shown


@needs_horovod
def test_a_rank_that_does_nothing(board):
    with another(board(), 1, last=("log_sync", "before")):
        error = error_of_a_stall(Watchdog(TIMEOUT, 0, 2, board()))
    assert error.endswith(
        "; rank 1 has not joined it: it is in no operation of Horovod; "
        "its last was log_sync 'before'"
    )


@needs_horovod
def test_a_rank_that_stops_reporting_is_named(board):
    """For example a stopped rank, or a rank whose machine has gone."""
    note = board()
    note.put("1", json.dumps({"beat": 7, "in": None, "last": "all-reduce 'net.bias'", "stack": []}))
    with another(board(), 2, ("all-reduce", "net.weight"), size=3):
        error = error_of_a_stall(Watchdog(3.0, 0, 3, board()))
    assert re.search(
        r"; rank 1 has not joined it and has sent no report for \d s "
        r"\(it is stopped, or its machine or network has gone\)",
        error,
    )
    assert error.endswith("it was in no operation of Horovod; its last was all-reduce 'net.bias'")
    assert "rank 2" not in error


@needs_horovod
def test_a_rank_that_never_reported_is_named(board):
    error = error_of_a_stall(Watchdog(3.0, 0, 2, board()))
    assert "rank 1 has not joined it, and has never sent a report" in error


@needs_horovod
def test_no_rank_is_blamed_if_all_ranks_wait(board):
    with another(board(), 1, ("all-reduce", "net.weight")):
        error = error_of_a_stall(Watchdog(TIMEOUT, 0, 2, board()))
    assert "every rank waits in it" in error


def test_a_server_that_does_not_answer(monkeypatch):
    """For example the server in a stopped rank 0. Without reports no rank is blamed."""
    monkeypatch.setattr(Board, "_PATIENCE", 0.2)
    with socket.socket() as listener:  # accepts connections and never answers
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        port = listener.getsockname()[1]
        dog = Watchdog(TIMEOUT, 1, 3, Board("127.0.0.1", port, "geartrain.1"))
        dog._heard = {
            0: ({"beat": 1, "in": "all-reduce 'net.weight'"}, time.monotonic() - 100),
            2: ({"beat": 1}, time.monotonic() - 100),
        }
        began = time.monotonic()
        error = error_of_a_stall(dog)
    assert f"it has no reports of the others: 127.0.0.1:{port} does not answer" in error
    assert "rank 0" not in error
    assert "rank 2" not in error
    assert time.monotonic() - began < 10


def test_many_short_waits_do_not_add_up():
    dog = Watchdog(0.6, 0)
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        with dog.watching("all-reduce", "x") as wait:
            time.sleep(0.1)
            wait.check()
    dog.leave(lambda: None, False)
    assert dog.verdict is None


def test_the_time_of_a_stopped_process_does_not_count(monkeypatch):
    """For example if a scheduler suspends all ranks for a while."""
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


def test_a_late_shutdown_does_not_end_the_process(monkeypatch):
    """The other ranks were ended before that, and the program continues."""
    monkeypatch.setenv("GEARTRAIN_PATIENCE", "unwind=0.2,grace=0.5")
    ended, released = [], threading.Event()
    monkeypatch.setattr(module.os, "_exit", ended.append)
    Watchdog(600.0, 0).leave(lambda: released.wait(30), True)
    (last,) = [thread for thread in threading.enumerate() if thread.name == "geartrain-horovod-end"]
    released.set()
    last.join(30)
    assert ended == []


sleep = ctypes.CDLL(None).sleep  # like a wait in C++, in which Python handles no signal


def hang_in_shutdown():
    with Watchdog(0.5, 1).watching("shutdown", ""):
        sleep(600)


def hang_after_an_error():
    """An error has ended the run. Horovod hangs when it shuts down at the end of the program."""
    Watchdog(0.5, 1).leave(lambda: sleep(600), True)
    sleep(600)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (hang_in_shutdown, "rank 1 still hangs in shutdown: its process is ended"),
        (
            hang_after_an_error,
            "rank 1 cannot leave Horovod, because other ranks hang: its process is ended",
        ),
    ],
)
def test_a_rank_that_hangs_in_c_is_ended(tmp_path, monkeypatch, function, words):
    monkeypatch.setenv("GEARTRAIN_PATIENCE", "unwind=0.5,grace=0.5")
    (rank,) = run(tmp_path, function, ranks=1)
    assert rank.end == "1"
    assert words in rank.err
