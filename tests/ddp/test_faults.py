"""Whatever happens to a rank: the run ends, says whose error came first, and leaves no process."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from faults import PROMPT, STARTED, ends_after_fault, marks

from geartrain.testing.launching import launched, listening, until

HERE = Path(__file__).parent


pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes through /proc")


def start(folder: Path, kind: str, rank: int, where: str, **environment: str):
    return launched(str(HERE / "fault.py"), kind, str(rank), where, folder=folder, **environment)


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        *(("exception", where) for where in ("setup", "train", "validation")),
        *(("SIGKILL", where) for where in ("setup", "train", "validation")),
        ("SIGTERM", "train"),
        ("SIGTERM", "setup"),
        ("SIGSEGV", "train"),
    ],
)
def test_rank_1(tmp_path, kind, where):
    with start(tmp_path, kind, 1, where) as run:
        assert ends_after_fault(run, tmp_path, 1) > 0
        told = "my own error" if kind == "exception" else kind
        assert "rank 1" in run.err
        assert told in run.err
        assert f"--- the end of rank 1's output ---\n{'[rank1]' if kind == 'exception' else ''}" in run.err or kind != "exception"
    expected = {"teardown-0", "on_exception-0"}
    if kind in ("exception", "SIGTERM"):
        expected |= {"teardown-1", "on_exception-1"}
    assert expected <= marks(tmp_path)
    assert "done-0" not in marks(tmp_path)


@pytest.mark.parametrize(
    ("kind", "where"),
    [("exception", "setup"), ("exception", "train"), ("exception", "validation"), ("SIGTERM", "train"), ("SIGINT", "validation")],
)
def test_rank_0(tmp_path, kind, where):
    with start(tmp_path, kind, 0, where) as run:
        assert ends_after_fault(run, tmp_path, 0) != 0
        assert ("KeyError: 'my own error'" if kind == "exception" else kind) in run.err
        assert "rank 1 failed" not in run.err
    # Rank 1 was in a collective, where Python hears nothing: rank 0 closed the connection.
    assert {"teardown-0", "on_exception-0", "teardown-1", "on_exception-1"} <= marks(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_starter_while_it_waits_for_a_rank(tmp_path, number):
    # Rank 1 is stopped, so rank 0 is blocked in a collective where no Python handler runs.
    with start(tmp_path, "SIGSTOP", 1, "train") as run:
        until((tmp_path / "marks" / "fault-1").exists, STARTED, "rank 1 stopped")
        run.process.send_signal(number)
        assert run.wait(PROMPT) != 0
        assert number.name in run.err
        until(lambda: not run.processes(), 2, "no process is left")
    assert "teardown-0" in marks(tmp_path)


@pytest.mark.slow
def test_a_stopped_rank_ends_the_run_at_the_timeout_and_is_named(tmp_path):
    # Not less, because ranks that share cores with another program's start apart.
    with start(tmp_path, "SIGSTOP", 1, "train", TIMEOUT="20", PATIENCE="60") as run:
        assert ends_after_fault(run, tmp_path, 1, 20 + PROMPT) > 0
        assert "rank 1 did not come" in run.err
    assert "teardown-0" in marks(tmp_path)


def test_a_stopped_rank_is_named_where_another_than_rank_0_has_waited_for_it(tmp_path):
    with start(tmp_path, "SIGSTOP", 1, "pair", DEVICES="3", PATIENCE="60") as run:
        assert ends_after_fault(run, tmp_path, 1, 4 + PROMPT) > 0
        assert "rank 1 did not come to a collective within the strategy's timeout (hung or stopped): rank 2 failed: " in run.err


@pytest.mark.slow
def test_a_rank_that_stays_stopped_ends_the_run_long_before_the_timeout(tmp_path):
    with start(tmp_path, "SIGSTOP", 1, "train") as run:
        assert ends_after_fault(run, tmp_path, 1, 30) > 0
        assert "rank 1 failed: it has been stopped (SIGSTOP) for 15 s" in run.err
    assert {"teardown-0", "on_exception-0"} <= marks(tmp_path)


def test_ranks_that_wait_for_a_stopped_one_tear_down(tmp_path):
    with start(tmp_path, "SIGSTOP", 1, "train", DEVICES="3", PATIENCE="3", SLOW="2", SECONDS="2") as run:
        assert ends_after_fault(run, tmp_path, 1) > 0
        assert "rank 1 failed: it has been stopped (SIGSTOP)" in run.err
    assert {"teardown-0", "on_exception-0", "teardown-2", "on_exception-2", "slow-2"} <= marks(tmp_path)


def test_rank_0_is_named_where_it_is_the_one_that_hangs(tmp_path):
    with start(tmp_path, "hang", 0, "pair") as run:
        assert ends_after_fault(run, tmp_path, 0, 4 + PROMPT) > 0
        assert "rank 0 did not come to a collective within the strategy's timeout (hung or stopped): rank 1 failed: " in run.err
    assert {"teardown-0", "on_exception-0"} <= marks(tmp_path)


def test_rank_0_is_given_time_to_tear_down(tmp_path):
    with start(tmp_path, "SIGKILL", 1, "train", SLOW="0", SECONDS="5", GRACE="1") as run:
        assert ends_after_fault(run, tmp_path, 1) > 0
        assert "rank 1 was ended by SIGKILL" in run.err
    assert {"slow-0", "teardown-0"} <= marks(tmp_path)


def test_rank_0_is_ended_where_it_hangs_in_leaving_its_group(tmp_path):
    with start(tmp_path, "SIGKILL", 1, "train", HANGS_LEAVING="1", GRACE="1") as run:
        assert ends_after_fault(run, tmp_path, 1) > 0
        assert "geartrain: rank 1 was ended by SIGKILL. This rank did not come to an end within " in run.err
    assert {"on_exception-0", "teardown-0"} <= marks(tmp_path)


def test_the_first_error_is_shown_where_another_rank_crashes_at_its_end(tmp_path):
    with start(tmp_path, "exception", 0, "train", ABORTS_AT_EXIT="1") as run:
        assert ends_after_fault(run, tmp_path, 0) > 0
        assert "KeyError: 'my own error'" in run.err
        assert "SIGABRT" not in run.err


def test_a_run_after_one_whose_last_moment_a_rank_did_not_survive_says_so(tmp_path):
    with start(tmp_path, "exception", 1, "after", TEARS_DOWN_AFTER_RANK_1="1") as run:
        assert ends_after_fault(run, tmp_path, 1) > 0
        assert "the other ranks of this program were ended after a run that failed; rank 1 failed: exit code 1" in run.err
        assert "KeyError: 'my own error'" in run.err.partition("--- the end of rank 1's output ---")[2]
    assert "done-0" not in marks(tmp_path)


def test_a_rank_that_leaves_early_is_named(tmp_path):
    with start(tmp_path, "leave", 1, "train") as run:
        assert ends_after_fault(run, tmp_path, 1) > 0
        assert "rank 1" in run.err.splitlines()[-2] + run.err.splitlines()[-1], run.err


@pytest.mark.parametrize("kind", ["exception", "SIGKILL"])
def test_a_worker_failing_after_fit_fails_the_command(tmp_path, kind):
    with start(tmp_path, kind, 1, "after") as run:
        assert ends_after_fault(run, tmp_path, 1) > 0
        assert "rank 1" in run.err
        assert ("my own error" if kind == "exception" else "SIGKILL") in run.err
    assert "done-0" in marks(tmp_path)


def test_rank_0_failing_after_fit_does_not_leave_rank_1_waiting_for_it(tmp_path):
    with start(tmp_path, "exception", 0, "between") as run:
        assert ends_after_fault(run, tmp_path, 0) > 0
        assert "my own error" in run.err


def test_the_first_error_is_shown_where_its_rank_leaves_after_one_that_failed_for_its_sake(tmp_path):
    with start(tmp_path, "exception", 1, "train", DEVICES="3", LEAVES_LATE="1") as run:
        assert ends_after_fault(run, tmp_path, 1) > 0
        assert "rank 1 failed: KeyError: 'my own error'" in run.err


def test_success_leaves_nothing(tmp_path):
    with start(tmp_path, "none", 0, "train") as run:
        run.succeed()
        until(lambda: not run.processes(), 5, "no process is left")
        assert {"done-0", "done-1"} <= marks(tmp_path)
        assert not list(run.temporary.glob("geartrain-*"))


def test_logs_in_the_output_folder(tmp_path):
    with start(tmp_path, "exception", 1, "train", OUTPUT="out") as run:
        assert ends_after_fault(run, tmp_path, 1) > 0
        assert "out/logs/rank-1.log" in run.err
    assert "my own error" in (tmp_path / "out" / "logs" / "rank-1.log").read_text()


def test_nothing_listens_outside_loopback(tmp_path):
    with start(tmp_path, "SIGSTOP", 1, "train", LOADER_WORKERS="1") as run:
        until((tmp_path / "marks" / "fault-1").exists, STARTED, "rank 1 stopped")
        found = listening(run.processes())
    assert found
    assert [address for address in found if address not in ("0100007F", "0" * 24 + "01000000")] == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(int(os.environ.get("GEARTRAIN_TEST_KILLS", "6"))))
def test_a_killed_starter_takes_everything_with_it(tmp_path, seed):
    wait = random.Random(seed).uniform(0.0, 2.0)
    with start(tmp_path, "none", 0, "train", LOADER_WORKERS="1", EPOCHS="100000") as run:
        # Even seeds: any moment after the worker was started. Odd ones: while it trains.
        if seed % 2:
            until((tmp_path / "marks" / "training-1").exists, STARTED, "training")
        else:
            until(lambda: len(run.processes()) > 1, STARTED, "a worker")
        moment = time.monotonic() + wait
        until(lambda: time.monotonic() > moment or run.process.poll() is not None, 10, "the moment")
        assert run.process.poll() is None, run.err
        run.process.kill()
        run.process.wait(5)
        until(lambda: not run.processes(), 10, f"no process is left, but {run.processes()}")
