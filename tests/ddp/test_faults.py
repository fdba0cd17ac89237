"""Failures of a rank: the run ends, names the rank that failed first, and leaves no process.

tests/parallel tests the decisions (test_failures.py) and the supervisor alone (test_workers.py).
"""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from faults import PROMPT, STARTED, ends_after_fault, marks

from geartrain_testing.launching import LOOPBACK, launched, listening, until

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="finds processes through /proc"
)
matrix, end_to_end, drill = pytest.mark.matrix, pytest.mark.end_to_end, pytest.mark.drill

LATE = "did not come to a collective within the strategy's timeout (hung or stopped): rank"
#: By kind of failure: the message if rank 1 fails, and the message if rank 0 fails. ``None``: no
#: rank is left to print one.
KINDS = {
    "exception": ("rank 1 failed: KeyError: 'my own error'", "KeyError: 'my own error'"),
    "SIGKILL": ("rank 1 was ended by SIGKILL", None),
    "SIGTERM": ("rank 1 failed: Interrupted: ended by SIGTERM", "Interrupted: ended by SIGTERM"),
    "leave": (
        "rank 1 left the program before the run ended: ",
        "rank 0 left the program before the run ended: ",
    ),
    "hang": (f"rank 1 {LATE} 0", f"rank 0 {LATE} 1"),
}
PHASES = ("setup", "train", "validation")
TABLE = [
    (kind, rank, phase)
    for kind in KINDS
    for rank in (0, 1)
    # tests/spawn runs all phases of all kinds, because a fork is cheap; the kit, those of rank 1.
    for phase in (PHASES if (kind, rank) == ("exception", 0) else ["train"])
]


def start(folder: Path, kind: str, rank: int, where: str, **environment: str):
    return launched(str(HERE / "fault.py"), kind, str(rank), where, folder=folder, **environment)


@matrix  # by default: tests/testing/test_conformance_ranks.py and tests/parallel/test_workers.py
@pytest.mark.parametrize(("kind", "rank", "where"), TABLE)
def test_a_rank_that_fails(tmp_path, kind, rank, where):
    message = KINDS[kind][1 - rank]
    with start(tmp_path, kind, rank, where, OUTPUT="out", LOADER_WORKERS="1") as run:
        code = ends_after_fault(run, tmp_path, rank)
        assert code == -signal.SIGKILL if message is None else code > 0
        if message is not None:
            assert message in run.err
            assert "terminate called" not in run.err
        if (kind, rank) == ("exception", 1):
            log = tmp_path / "out" / "logs" / "rank-1.log"
            assert "my own error" in log.read_text()
            assert f"(its output: {log})" in run.err
            assert "--- the end of rank 1's output ---\n[rank1]" in run.err
        if (kind, rank) == ("exception", 0):
            assert "rank 1 failed" not in run.err
    dead = {rank} if kind == "SIGKILL" else set()
    if dead != {0}:  # no rank survives rank 0
        # The other rank may be in a collective, in which Python handles no signal. The failed rank
        # unblocks it by closing its connections.
        assert {
            f"{what}-{alive}" for what in ("teardown", "on_exception") for alive in {0, 1} - dead
        } <= marks(tmp_path)
    assert "done-0" not in marks(tmp_path)


# --- the process that starts the ranks -----------------------------------------------------------


@end_to_end  # by default: test_workers.py of parallel, and ddp_spawn
def test_ctrl_c_while_the_starter_waits_for_a_rank(tmp_path):
    # Rank 1 is stopped, so rank 0 is blocked in a collective where no Python handler runs.
    with start(tmp_path, "SIGSTOP", 1, "train", LOADER_WORKERS="1") as run:
        until((tmp_path / "marks" / "fault-1").exists, STARTED, "rank 1 stopped")
        found = listening(run.processes())
        assert found
        assert [address for address in found if address not in LOOPBACK] == []
        run.process.send_signal(signal.SIGINT)
        assert run.wait(PROMPT) != 0
        assert "SIGINT" in run.err
        until(lambda: not run.processes(), 2, "no process is left")
    assert "teardown-0" in marks(tmp_path)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=end_to_end if seed == 1 else drill)
        for seed in range(int(os.environ.get("GEARTRAIN_TEST_KILLS", "6")))
    ],
)
def test_a_killed_starter_takes_everything_with_it(tmp_path, seed):
    wait = random.Random(seed).uniform(0.0, 2.0)
    with start(tmp_path, "none", 0, "train", LOADER_WORKERS="1", EPOCHS="100000") as run:
        # Even seeds: at any moment after the worker has started. Odd seeds: during training.
        if seed % 2:
            until((tmp_path / "marks" / "training-1").exists, STARTED, "training")
        else:
            until(lambda: len(run.processes()) > 1, STARTED, "a worker")
        moment = time.monotonic() + wait
        until(lambda: time.monotonic() > moment or run.process.poll() is not None, 10, "the moment")
        assert run.process.poll() is None, run.err
        run.process.kill()
        run.process.wait(5)
        until(lambda: not run.processes(), 30, f"no process is left, but {run.processes()}")


# --- stopped ranks -------------------------------------------------------------------------------


@end_to_end
def test_a_stopped_rank_is_named_if_another_than_rank_0_has_waited_for_it(tmp_path):
    with start(tmp_path, "late", 1, "train", DEVICES="3", GEARTRAIN_PATIENCE="stopped=60") as run:
        assert ends_after_fault(run, tmp_path, 1) > 0
        assert f"rank 1 {LATE} 2 failed: " in run.err


@end_to_end
def test_a_rank_that_stays_stopped_ends_the_run_and_ranks_that_wait_for_it_tear_down(tmp_path):
    with start(
        tmp_path,
        "SIGSTOP",
        1,
        "train",
        DEVICES="3",
        GEARTRAIN_PATIENCE="stopped=1",
        SLOW="2",
        SECONDS="2",
    ) as run:
        assert ends_after_fault(run, tmp_path, 1) > 0
        assert "rank 1 failed: it has been stopped (SIGSTOP) for 1 s" in run.err
    assert {"teardown-0", "on_exception-0", "teardown-2", "on_exception-2", "slow-2"} <= marks(
        tmp_path
    )


# --- the end of a program ------------------------------------------------------------------------


@end_to_end
def test_the_first_error_is_shown_if_another_rank_crashes_at_its_end(tmp_path):
    with start(tmp_path, "exception", 0, "train", ABORTS_AT_EXIT="1") as run:
        assert ends_after_fault(run, tmp_path, 0) > 0
        assert "KeyError: 'my own error'" in run.err
        assert "SIGABRT" not in run.err


@end_to_end
def test_the_first_error_is_shown_if_its_rank_leaves_after_one_that_failed_because_of_it(tmp_path):
    with start(tmp_path, "exception", 1, "train", DEVICES="3", LEAVES_LATE="1") as run:
        assert ends_after_fault(run, tmp_path, 1) > 0
        assert "rank 1 failed: KeyError: 'my own error'" in run.err


@end_to_end
def test_a_run_names_the_rank_that_failed_at_the_end_of_the_previous_run(tmp_path):
    with start(tmp_path, "exception", 1, "after", TEARS_DOWN_AFTER_RANK_1="1") as run:
        assert ends_after_fault(run, tmp_path, 1) > 0
        assert (
            "the other ranks of this program were ended after a run that failed; "
            "rank 1 failed: exit code 1"
        ) in run.err
        assert (
            "KeyError: 'my own error'" in run.err.partition("--- the end of rank 1's output ---")[2]
        )
    assert "done-0" not in marks(tmp_path)
