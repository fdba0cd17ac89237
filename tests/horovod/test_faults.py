"""Whatever happens to a rank under Horovod: the run ends, the cause is named, and no process is left."""

import sys
import sysconfig
import time
from pathlib import Path

import pytest

from geartrain.testing.launching import Launched, until
from geartrain_horovod.installed import missing

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes through /proc"),
]
HERE = Path(__file__).parent
#: Seconds from a fault to the end of the run; what stalls gets those of its timeout too.
PROMPT = 30
STARTED = 90


class Ended:
    def __init__(self, run, folder, seconds):
        self.code, self.seconds, self.printed, self.folder = run.process.returncode, seconds, run.out + run.err, folder

    def error(self, rank):
        return (self.folder / "marks" / f"error-{rank}").read_text()


def run(folder, kind, launcher=(), stall=60.0):
    """Run the program until nothing is left of it."""
    command = [*launcher, sys.executable, str(HERE / "fault.py"), kind]
    program = Launched(command, folder, {"STALL": str(stall)})
    try:
        marks = folder / "marks"
        until(lambda: (marks / "fault-1").exists() or program.process.poll() is not None, STARTED, "the fault")
        began = time.monotonic()
        program.wait(PROMPT + (stall if kind in ("skip", "loop") else 0))
        assert (marks / "fault-1").exists(), program.out + program.err
        until(lambda: not program.processes(), 10, f"no process is left, but {program.processes()}")
        return Ended(program, folder, time.monotonic() - began)
    finally:
        program.kill()


def horovodrun(*options):
    return [str(Path(sysconfig.get_path("scripts"), "horovodrun")), "-np", "2", "--gloo", "--network-interfaces", "lo", *options]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["geartrain", "horovodrun"])
class TestFaults:
    def start(self, launcher, *arguments, **options):
        return run(*arguments, launcher=horovodrun() if launcher == "horovodrun" else (), **options)

    def test_a_rank_that_skips_a_collective(self, tmp_path, launcher):
        ended = self.start(launcher, tmp_path, "skip", stall=4.0)
        assert ended.code != 0
        assert "has waited 4 s for the others in all_gather 'geartrain.1.all_gather." in ended.printed + ended.error(0)
        assert "; rank 1 has not joined it: it is in all-reduce '" in ended.error(0)
        assert "--- rank 1 is at ---" in ended.printed
        assert "fault.py" in ended.printed.partition("--- rank 0 is at ---")[2]  # whose stack shows where it waits

    def test_a_rank_that_never_comes(self, tmp_path, launcher):
        ended = self.start(launcher, tmp_path, "loop", stall=4.0)
        assert ended.code != 0
        assert "; rank 1 has not joined it: it is in no operation of Horovod; its last was all-reduce '" in ended.error(0)
        assert "threading.Event().wait()" in ended.printed.partition("--- rank 1 is at ---")[2]

    def test_a_stopped_rank(self, tmp_path, launcher):
        ended = self.start(launcher, tmp_path, "SIGSTOP", stall=4.0)
        assert ended.code != 0
        assert "rank 1" in ended.error(0)
        assert "has said nothing for" in ended.error(0) or "no answer from rank 1" in ended.error(0)

    def test_a_killed_rank(self, tmp_path, launcher):
        ended = self.start(launcher, tmp_path, "SIGKILL")
        assert ended.code != 0
        assert "no answer from rank 1" in ended.error(0)

    def test_a_rank_that_raises(self, tmp_path, launcher):
        ended = self.start(launcher, tmp_path, "exception")
        assert ended.code != 0
        assert ended.error(1) == "KeyError: 'my own error'"
        assert "KeyError: 'my own error'" in ended.printed
