"""If a rank fails, the run ends, names the first error and leaves no process."""

import json
from pathlib import Path

import pytest
from faults import PROMPT, ends_after_fault, marks

from geartrain_testing.launching import launched

PROGRAM = str(Path(__file__).parents[1] / "ddp" / "fault.py")
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="finds processes through /proc"
)
#: Name -> (the strategy's options, the optimizer's class if the algorithm needs its own).
ALGORITHMS = {
    "gradient_allreduce": ({"algorithm": "gradient_allreduce"}, ""),
    "bytegrad": ({"algorithm": "bytegrad", "hierarchical": False}, ""),
    "qadam": ({"algorithm": "qadam", "hierarchical": False}, "QAdamOptimizer"),
    "decentralized": ({"algorithm": "decentralized"}, ""),
    "low_precision_decentralized": (
        {"algorithm": "low_precision_decentralized", "hierarchical": False},
        "",
    ),
    "async": ({"algorithm": "async", "sync_interval_ms": 10}, ""),
}
matrix = pytest.mark.matrix
#: Faults for each algorithm. tests/ddp has the other faults, because core ends a run in the same
#: way with each algorithm. The faults here are at points where an algorithm communicates: during
#: backward, and in the thread of ``async``, which communicates at any time. bytegrad and qadam use
#: the groups of gradient_allreduce.
EVERYWHERE = [(1, "exception", "backward")]
KILLED = [(1, "SIGKILL", "train")]
THREAD = [
    (1, "exception", "train"),
    (0, "exception", "train"),
    (0, "SIGTERM", "train"),
    (0, "exception", "validation"),
]
TABLE = [
    (algorithm, *fault)
    for algorithm in ALGORITHMS
    for fault in EVERYWHERE
    + (KILLED if algorithm in ("gradient_allreduce", "async") else [])
    + (THREAD if algorithm == "async" else [])
]


def start(folder: Path, algorithm: str, kind: str, rank: int, where: str, **environment: str):
    options, optimizer = ALGORITHMS[algorithm]
    environment |= {"STRATEGY": "bagua", "OPTIONS": json.dumps(options), "OPTIMIZER": optimizer}
    return launched(PROGRAM, kind, str(rank), where, folder=folder, **environment)


@matrix  # by default: test_async.py, and the kit's case of ddp in which a rank fails
@pytest.mark.parametrize(("algorithm", "rank", "kind", "where"), TABLE)
def test_a_failing_rank_ends_the_run(tmp_path, algorithm, rank, kind, where):
    with start(tmp_path, algorithm, kind, rank, where) as run:
        assert ends_after_fault(run, tmp_path, rank) > 0
        assert ("KeyError: 'my own error'" if kind == "exception" else kind) in run.err
        assert "rank 1" in run.err if rank == 1 else "rank 1 failed" not in run.err
        assert "terminate called" not in run.err
    alive = {0} if kind == "SIGKILL" else {0, 1}
    hooks = {f"{hook}-{each}" for hook in ("teardown", "on_exception") for each in alive}
    assert hooks <= marks(tmp_path)
    assert "done-0" not in marks(tmp_path)


@matrix
def test_a_stopped_rank_ends_the_run_at_the_timeout_and_is_named(tmp_path):
    """The thread of ``async`` waits for it, while the other rank continues to train."""
    # Not less: on busy cores, ranks do not start at the same time.
    with start(
        tmp_path, "async", "SIGSTOP", 1, "train", TIMEOUT="20", GEARTRAIN_PATIENCE="stopped=60"
    ) as run:
        assert ends_after_fault(run, tmp_path, 1, 20 + PROMPT) > 0
        assert "rank 1 did not come" in run.err
    assert "teardown-0" in marks(tmp_path)
