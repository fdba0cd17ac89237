"""The supervisor with real processes without torch, which end in different ways.

The test's process is rank 0.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

import geartrain as gt
from geartrain.launch.signals import Interrupted
from geartrain_parallel import rerun_command as relaunch, workers
from geartrain_parallel.reports import begin, leave, report
from geartrain_parallel.supervisor import is_stopped
from geartrain_parallel.workers import Workers
from geartrain_testing.launching import HAS_PROC, until

pytestmark = pytest.mark.skipif(not HAS_PROC, reason="a process's state is read from /proc")

#: The program of a rank, which runs the code in its variable DO.
RANK = """
import os, signal, sys, time
from geartrain_parallel.reports import report

def fail(error):
    try:
        raise error
    except type(error):
        report(error)
        raise

def kill(number):
    os.kill(os.getpid(), number)
    time.sleep(600)

def mark(name):
    open(name, "w").close()

exec(os.environ["DO"])
"""
SLEEP = "mark('ready'); time.sleep(600)"
LOST = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"
WAITED = (
    "[gloo/transport/tcp/unbound_buffer.cc:78] "
    "Timed out waiting 4000ms for recv operation to complete"
)
LATE = "did not come to a collective within the strategy's timeout"


class Node:
    """Starts the ranks 1, 2, ..., each with its own code."""

    def __init__(self, folder):
        self.folder, self.started = folder, None

    def start(self, *codes, nodes=1):
        size = str((len(codes) + 1) * nodes)
        self.started = Workers(
            [{"RANK": str(i), "WORLD_SIZE": size, "DO": code} for i, code in enumerate(codes, 1)],
            self.folder / "logs",
        )
        return self.started

    def work(self, function, *arguments):
        """Work as rank 0."""
        with self.started.supervised():
            return function(*arguments)

    def fail(self, error, ready=None):
        """Fail as rank 0, when another rank is ready."""
        self.work(self._fail, error, ready or (self.folder / "ready").exists)

    def _fail(self, error, ready):
        until(ready, 20, "another rank is ready")
        report(error)
        raise error

    def pids(self):
        return [worker.pid for worker in self.started._workers]

    def have_ended(self):
        return not any(is_running(pid) for pid in self.pids())


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def node(tmp_path, monkeypatch):
    monkeypatch.setenv("GEARTRAIN_PATIENCE", "unwind=0.5,grace=0.5,teardown=2,stopped=0.5")
    monkeypatch.setattr(relaunch, "command", lambda: [sys.executable, "-c", RANK])
    monkeypatch.setattr(workers, "START_DIRECTORY", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    begin()
    node = Node(tmp_path)
    yield node
    begin()
    if node.started is not None:
        node.started.supervisor.end()
        assert node.have_ended()


@pytest.fixture
def forced(monkeypatch):
    """The exit codes of this process's calls of ``_exit``, which do not end it."""
    codes = []
    monkeypatch.setattr(workers, "_exit", codes.append)
    monkeypatch.setattr(workers, "remove_temporary_folder", lambda: None)
    return codes


def wait():
    """Run Python code for longer than any test."""
    until(lambda: False, 20, "the end of this wait")


# --- another rank fails first ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("fail(KeyError('mine'))", "rank 1 failed: KeyError: 'mine'\nTraceback"),
        ("sys.exit(7)", "rank 1 failed: exit code 7"),
        ("kill(signal.SIGKILL)", "rank 1 was ended by SIGKILL"),
        ("kill(signal.SIGSTOP)", "rank 1 failed: it has been stopped (SIGSTOP) for 0.5 s"),
    ],
)
def test_a_rank_that_fails_first_is_named(node, capfd, code, said):
    node.start(f"print('its output', flush=True); {code}", SLEEP)
    with pytest.raises(gt.TrainingError) as raised:
        node.work(wait)
    assert str(raised.value).startswith(said)
    assert str(raised.value).endswith(f"(its output: {node.folder}/logs/rank-1.log)")
    assert "--- the end of rank 1's output ---\nits output\n" in capfd.readouterr().err
    assert node.have_ended()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("fail(KeyError('mine'))", "failed: KeyError: 'mine'"),
        ("kill(signal.SIGKILL)", "was ended by SIGKILL"),
    ],
)
def test_a_rank_that_fails_first_is_named_if_rank_0_then_fails(node, code, said):
    node.start(code)
    with pytest.raises(gt.TrainingError, match=f"rank 1 {said}"):
        node.fail(RuntimeError(LOST), node.have_ended)


def test_rank_0_is_late_if_all_others_waited(node):
    node.start(f"fail(RuntimeError({WAITED!r}))")
    with pytest.raises(gt.TrainingError) as raised:
        node.work(wait)
    assert str(raised.value).startswith(
        f"rank 0 {LATE} (hung or stopped): rank 1 failed: RuntimeError: {WAITED}"
    )


def test_rank_0_is_not_late_if_a_rank_of_another_node_may_be(node):
    node.start(f"fail(RuntimeError({WAITED!r}))", nodes=2)
    with pytest.raises(gt.TrainingError, match=r"^rank 1 failed: RuntimeError: .*Timed out"):
        node.work(wait)


def test_the_next_run_of_the_program_is_refused_with_the_reason(node):
    node.start("kill(signal.SIGKILL)")
    with pytest.raises(gt.TrainingError):
        node.work(wait)
    with pytest.raises(
        gt.TrainingError,
        match=r"ended after a run that failed; rank 1 was ended by SIGKILL\. Fix: start the",
    ):
        node.work(wait)


# --- rank 0 fails ---------------------------------------------------------------------------------


def test_a_stopped_rank_is_killed_at_once_if_rank_0_fails(node, monkeypatch):
    monkeypatch.setenv("GEARTRAIN_PATIENCE", "grace=600")
    node.start("kill(signal.SIGSTOP)")
    with pytest.raises(KeyError, match="mine"):
        node.fail(KeyError("mine"), lambda: is_stopped(node.pids()[0]))
    assert node.have_ended()


@pytest.mark.parametrize("code", [SLEEP, "signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP])
def test_rank_0s_own_error_is_raised_and_the_others_end(node, code):
    node.start(code)
    with pytest.raises(KeyError, match="mine"):
        node.fail(KeyError("mine"))
    assert node.have_ended()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_rank_0_ends_all(node, number):
    node.start(SLEEP)

    def work():
        os.kill(os.getpid(), number)
        wait()

    with pytest.raises(Interrupted, match=number.name):
        node.work(work)
    assert node.have_ended()


def test_a_signal_works_while_rank_0_runs_no_python_code(node):
    """As in a collective, which returns when the others end."""
    node.start(SLEEP)
    libc, mutex, ended = ctypes.CDLL(None), ctypes.create_string_buffer(64), []

    def signal_and_look():
        try:
            # glibc sets this byte to 2 if a thread waits for the mutex.
            until(lambda: mutex.raw[0] == 2, 20, "this process waits for the mutex")
            os.kill(os.getpid(), signal.SIGTERM)
            ended.append(until(node.have_ended, 20, "rank 1 has ended"))
        finally:
            libc.pthread_mutex_unlock(mutex)

    def work():
        thread.start()
        libc.pthread_mutex_lock(mutex)  # unlike a sleep, a signal does not end it
        wait()

    thread = threading.Thread(target=signal_and_look)
    libc.pthread_mutex_lock(mutex)
    with pytest.raises(Interrupted, match="SIGTERM"):
        node.work(work)
    thread.join()
    assert ended


def test_a_failure_between_two_runs_ends_the_second(node):
    node.start("kill(signal.SIGKILL)", SLEEP)
    until(lambda: not is_running(node.pids()[0]), 20, "rank 1 has ended")
    node.started.supervisor.look()
    began = time.monotonic()
    with pytest.raises(gt.TrainingError, match="rank 1 was ended by SIGKILL"):
        node.work(wait)
    assert time.monotonic() < began + 10
    assert node.have_ended()


def test_a_rank_that_missed_sigterm_gets_it_again(node, monkeypatch):
    monkeypatch.setenv("GEARTRAIN_PATIENCE", "unwind=0.1,grace=20")
    node.start(
        "end = lambda *_: (mark('again'), sys.exit()); "
        "signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, end)); " + SLEEP
    )
    with pytest.raises(KeyError, match="mine"):
        node.fail(KeyError("mine"))
    assert (node.folder / "again").exists()
    assert node.have_ended()


def test_a_ranks_child_processes_end_with_the_rank(node):
    node.start(
        "import subprocess; child = subprocess.Popen(['sleep', '600']); "
        "open('child', 'w').write(str(child.pid)); " + SLEEP
    )
    with pytest.raises(KeyError, match="mine"):
        node.fail(KeyError("mine"))
    child = int((node.folder / "child").read_text())
    until(lambda: not is_running(child), 5, "the child of rank 1 has ended")


# --- rank 0 does not end --------------------------------------------------------------------------


def until_interrupted(teardown):
    """Work until the supervisor interrupts this rank, then tear down."""
    try:
        wait()
    except Interrupted as error:
        teardown(error)
        raise


def test_rank_0_is_given_time_to_tear_down(node, forced, monkeypatch):
    monkeypatch.setenv("GEARTRAIN_PATIENCE", "grace=1")
    node.start("kill(signal.SIGKILL)")

    def teardown(error):
        report(error)
        time.sleep(2)  # longer than the grace
        leave()

    with pytest.raises(gt.TrainingError, match="rank 1 was ended by SIGKILL"):
        node.work(until_interrupted, teardown)
    assert forced == []


@pytest.mark.parametrize("part", ["working", "tearing down", "leaving"])
def test_rank_0_is_ended_if_it_hangs(node, forced, capfd, part):
    node.start("kill(signal.SIGKILL)")

    def teardown(error):
        if part != "working":
            report(error)
        if part == "leaving":
            leave()
        until(lambda: forced, 20, "the end of this process")

    with pytest.raises(gt.TrainingError):
        node.work(until_interrupted, teardown)
    assert forced == [1]
    assert (
        "geartrain: rank 1 was ended by SIGKILL. This rank did not end within "
        in capfd.readouterr().err
    )


def test_leaving_the_program_during_a_run_is_a_failure(node, forced, capfd):
    node.start(SLEEP)
    node.work(lambda: os._exit(0))
    assert forced == [1]
    assert (
        "geartrain: rank 0 left the program before the run ended (os._exit(0))"
        in capfd.readouterr().err
    )
    assert node.have_ended()


# --- after the run --------------------------------------------------------------------------------


def test_rank_0_waits_for_the_others_at_the_end_of_the_program(node):
    supervisor = node.start("time.sleep(1.5); mark('done')")
    node.work(begin)
    supervisor.finish(failed=False)
    assert (node.folder / "done").exists()


@pytest.mark.parametrize(
    ("code", "said"),
    [("fail(KeyError('mine'))", "KeyError: 'mine'"), ("kill(signal.SIGKILL)", "SIGKILL")],
)
def test_a_rank_that_fails_after_the_run_fails_the_program(node, code, said):
    supervisor = node.start(f"time.sleep(0.3); {code}", SLEEP)
    node.work(begin)
    with pytest.raises(gt.TrainingError, match=f"rank 1 .*{said}"):
        supervisor.finish(failed=False)
    assert node.have_ended()


def test_the_last_lines_of_a_program_are_written_before_a_failed_rank_ends_it(
    tmp_path, monkeypatch, forced
):
    class Failed:
        exit_code = 1

        def finish(self, failed):
            raise gt.TrainingError("rank 1 failed")

    at_the_end, path = [], tmp_path / "out"
    monkeypatch.setattr(workers.atexit, "register", at_the_end.append)
    with path.open("w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        workers.at_exit(Failed())
        print("the last line")
        at_the_end[0]()
        assert (forced, path.read_text()) == ([1], "the last line\n")


def test_a_program_that_failed_after_the_run_does_not_wait_for_the_others(node):
    supervisor = node.start(SLEEP)
    node.work(begin)
    supervisor.finish(failed=True)
    assert node.have_ended()


# --- start of ranks -------------------------------------------------------------------------------


def test_under_nohup_the_others_ignore_sighup(node):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        supervisor = node.start("os.kill(os.getpid(), signal.SIGHUP); mark('ready')")
        node.work(os.kill, os.getpid(), signal.SIGHUP)
        supervisor.finish(failed=False)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (node.folder / "ready").exists()


def test_an_invalid_patience_starts_no_rank(node, monkeypatch):
    monkeypatch.setenv("GEARTRAIN_PATIENCE", "grace")
    with pytest.raises(gt.UsageError, match="GEARTRAIN_PATIENCE"):
        node.start(SLEEP)
    assert not (node.folder / "logs").exists()


def test_if_a_rank_cannot_be_started_the_others_end(node, monkeypatch):
    started, start = [], workers._Worker.start

    def start_one(*arguments):
        if started:
            raise OSError("no memory is left")
        started.append(start(*arguments))
        return started[0]

    monkeypatch.setattr(workers._Worker, "start", start_one)
    with pytest.raises(OSError, match="no memory is left"):
        node.start(SLEEP, SLEEP)
    assert not is_running(started[0].pid)
