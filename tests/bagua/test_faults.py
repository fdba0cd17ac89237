"""Whatever happens to a rank under any algorithm: the run ends, says whose error came first, and leaves no process."""

import json
from pathlib import Path

import pytest
from faults import PROMPT, STARTED, ends_after_fault, marks

from geartrain.testing.launching import launched, until

HERE = Path(__file__).parent


pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes through /proc")
#: Options of the strategy -> the optimizer's class, where it is the algorithm's own.
ALGORITHMS = {
    "gradient_allreduce": ({"algorithm": "gradient_allreduce"}, ""),
    "bytegrad": ({"algorithm": "bytegrad", "hierarchical": False}, ""),
    "qadam": ({"algorithm": "qadam", "hierarchical": False}, "QAdamOptimizer"),
    "decentralized": ({"algorithm": "decentralized"}, ""),
    "low_precision_decentralized": ({"algorithm": "low_precision_decentralized", "hierarchical": False}, ""),
    "async": ({"algorithm": "async", "sync_interval_ms": 10}, ""),
}
#: Those whose threads and groups differ: the others communicate where gradient_allreduce does.
DIFFERENT = ("gradient_allreduce", "decentralized", "low_precision_decentralized", "async")


def chosen(algorithm, *fault):
    """A case; marked ``long`` unless it is one of few: an error and a kill for those that differ, every phase for the one with a thread of
    its own, and a backward whose gradients are on their way."""
    ever = fault in ((1, "exception", "train"), (1, "SIGKILL", "train")) and algorithm in DIFFERENT
    also = algorithm == "async" or (algorithm, *fault) == ("gradient_allreduce", 1, "exception", "backward")
    return pytest.param(algorithm, *fault, marks=() if ever or also else pytest.mark.long, id="-".join(map(str, (algorithm, *fault))))


def start(folder: Path, algorithm: str, kind: str, rank: int, where: str, **environment: str):
    options, optimizer = ALGORITHMS[algorithm]
    environment = {"OPTIONS": json.dumps(options), "OPTIMIZER": optimizer, **environment}
    return launched(str(HERE / "fault.py"), kind, str(rank), where, folder=folder, **environment)


FAULTS_1 = [(1, "exception", "train"), (1, "exception", "backward"), (1, "SIGKILL", "train")]
FAULTS_0 = [(0, "exception", "train"), (0, "SIGTERM", "train"), (0, "exception", "validation")]


@pytest.mark.parametrize(("algorithm", "rank", "kind", "where"), [chosen(one, *fault) for one in ALGORITHMS for fault in FAULTS_1])
def test_rank_1(tmp_path, algorithm, rank, kind, where):
    with start(tmp_path, algorithm, kind, rank, where) as run:
        assert ends_after_fault(run, tmp_path, rank) > 0
        assert "rank 1" in run.err
        assert ("my own error" if kind == "exception" else kind) in run.err
        assert "terminate called" not in run.err
    assert {"teardown-0", "on_exception-0"} <= marks(tmp_path)
    assert "done-0" not in marks(tmp_path)


@pytest.mark.parametrize(("algorithm", "rank", "kind", "where"), [chosen(one, *fault) for one in ALGORITHMS for fault in FAULTS_0])
def test_rank_0(tmp_path, algorithm, rank, kind, where):
    with start(tmp_path, algorithm, kind, rank, where) as run:
        assert ends_after_fault(run, tmp_path, rank) != 0
        assert ("KeyError: 'my own error'" if kind == "exception" else kind) in run.err
        assert "rank 1 failed" not in run.err
        assert "terminate called" not in run.err
    assert {"teardown-0", "on_exception-0", "teardown-1", "on_exception-1"} <= marks(tmp_path)


@pytest.mark.parametrize("algorithm", [pytest.param(one, marks=() if one in DIFFERENT else pytest.mark.long) for one in ALGORITHMS])
def test_a_rank_that_stays_stopped_ends_the_run_long_before_the_timeout(tmp_path, algorithm):
    with start(tmp_path, algorithm, "SIGSTOP", 1, "train", PATIENCE="3") as run:
        assert ends_after_fault(run, tmp_path, 1) > 0
        assert "rank 1 failed: it has been stopped (SIGSTOP)" in run.err
    assert "teardown-0" in marks(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [pytest.param(one, marks=() if one == "async" else pytest.mark.long) for one in ALGORITHMS])
def test_a_stopped_rank_ends_the_run_at_the_timeout_and_is_named(tmp_path, algorithm):
    with start(tmp_path, algorithm, "SIGSTOP", 1, "train", TIMEOUT="20", PATIENCE="60") as run:
        assert ends_after_fault(run, tmp_path, 1, 20 + PROMPT) > 0
        assert "rank 1 did not come" in run.err
    assert "teardown-0" in marks(tmp_path)


def test_a_signal_while_the_starter_waits_for_a_stopped_rank(tmp_path):
    with start(tmp_path, "gradient_allreduce", "SIGSTOP", 1, "train") as run:
        until((tmp_path / "marks" / "fault-1").exists, STARTED, "rank 1 stopped")
        run.process.terminate()
        assert run.wait(PROMPT) != 0
        assert "SIGTERM" in run.err
        until(lambda: not run.processes(), 2, "no process is left")
    assert "teardown-0" in marks(tmp_path)
