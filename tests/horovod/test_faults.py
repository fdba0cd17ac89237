"""Failures of a rank under Horovod: the run ends, names the cause, and leaves no process."""

import re
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from geartrain_horovod.installed import missing
from geartrain_testing.launching import Launched, until

pytestmark = [
    pytest.mark.horovod,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.skipif(
        not Path("/proc/self/environ").exists(), reason="finds processes through /proc"
    ),
]
HERE = Path(__file__).parent
#: Seconds from a fault to the end of the run; a stall also gets its timeout.
PROMPT = 30
STARTED = 90
#: The stall timeout in seconds; a busy machine needs so much for a healthy wait.
STALL = 12.0


class Ended:
    def __init__(self, run, folder, seconds):
        self.code, self.printed = run.process.returncode, run.out + run.err
        self.seconds, self.folder = seconds, folder

    def error(self, rank):
        return (self.folder / "marks" / f"error-{rank}").read_text()


def run(folder, kind, launcher=(), stall=60.0):
    """Run the program until all its processes have ended.

    Args:
        stall: the strategy's ``stall_timeout``; ``None``: its default.
    """
    command = [*launcher, sys.executable, str(HERE / "fault.py"), kind]
    # The stall must end the run, not the patience with a stopped rank.
    program = Launched(
        command,
        folder,
        {} if stall is None else {"STALL": str(stall), "GEARTRAIN_PATIENCE": "stopped=600"},
    )
    try:
        marks = folder / "marks"
        until(
            lambda: (marks / "fault-1").exists() or program.process.poll() is not None,
            STARTED,
            "the fault",
        )
        began = time.monotonic()
        program.wait(PROMPT + (stall if stall is not None and stall < PROMPT else 0))
        assert (marks / "fault-1").exists(), program.out + program.err
        until(lambda: not program.processes(), 30, f"no process is left, but {program.processes()}")
        return Ended(program, folder, time.monotonic() - began)
    finally:
        program.kill()


def horovodrun(*options):
    program = str(Path(sysconfig.get_path("scripts"), "horovodrun"))
    return [program, "-np", "2", "--gloo", "--network-interfaces", "lo", *options]


def test_a_rank_that_skips_a_collective(tmp_path):
    ended = run(tmp_path, "skip", stall=STALL)
    assert ended.code != 0
    # The first rank to notice reports the wait. The other may only find that its peer has gone.
    errors = [ended.error(rank) for rank in (0, 1)]
    first = 0 if "has waited" in errors[0] else 1
    # The operation is log_sync, because sizes are gathered before tensors.
    here, there = [
        ("log_sync 'geartrain.1.log_sync.", "all-reduce"),
        ("all-reduce", "log_sync 'geartrain.1.log_sync."),
    ][first]
    assert re.search(
        rf"rank {first} has waited \d+ s for the others in {re.escape(here)}", errors[first]
    )
    assert f"; rank {1 - first} has not joined it: it is in {there}" in errors[first]
    assert f"--- rank {1 - first} is at ---" in ended.printed
    assert "self.all_gather(torch.ones(1))" in ended.printed.partition("--- rank 0 is at ---")[2]


def test_a_stopped_rank_of_horovodrun(tmp_path):
    ended = run(tmp_path, "SIGSTOP", horovodrun(), stall=STALL)
    assert ended.code != 0
    error = ended.error(0)
    assert (
        "rank 1 has not joined it and has sent no report for" in error
        or "no answer from rank 1" in error
    )


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("SIGKILL", r"rank 1 was ended by SIGKILL"),
        ("exception", r"rank 1 failed: KeyError: 'my own error'"),
        # The supervisor of ranks or Gloo's background thread of rank 0 notices it first.
        (
            "SIGSTOP",
            r"rank 1 failed: it has been stopped|no answer from rank 1|rank 1 .*has sent no report",
        ),
    ],
)
def test_a_failed_run_ends_within_30_seconds_by_default(tmp_path, kind, cause):
    """Without an option: the default ``stall_timeout`` is half an hour, and is not reached."""
    ended = run(tmp_path, kind, stall=None)
    assert ended.code != 0
    assert ended.seconds < PROMPT, "from the fault until no process is left"
    errors = [path.read_text() for path in (tmp_path / "marks").glob("error-*")]
    assert re.search(cause, "\n".join([ended.printed, *errors])), ended.printed
