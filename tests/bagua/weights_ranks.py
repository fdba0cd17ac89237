"""Results of four ranks in ``weights_program.py``, for algorithms that exchange weights."""

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

from . import reference_weights as reference
from .programs import Programs

HERE = Path(__file__).parent
RANKS = 4
#: Seconds; the program takes 20 on two idle cores.
DEADLINE = 240


#: The programs of this pytest run, from conftest.py.
programs: list[Programs] = []


@functools.cache
def found():
    """Return for each rank the results by the case's name."""
    folder = programs[0].once("weights", _run)
    if (failure := folder / "failure").exists():
        raise AssertionError(failure.read_text())
    return [torch.load(folder / f"found-{rank}.pt") for rank in range(RANKS)]


def _run(folder):
    command = [sys.executable, str(HERE / "weights_program.py"), str(folder)]
    code, log = None, folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            code = process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            out.write(f"still running after {DEADLINE} s".encode())
        finally:
            if process.poll() is None:  # kill the ranks too, which are in its session
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert code == 0, log.read_text(errors="replace")


def assert_starts_from_rank_0(name, steps):
    """Check that a run that resumes on other ranks has the steps and rank 0's weights."""
    start = reference.flat(reference.net())
    for rank in found():
        assert rank[f"{name} on other ranks"]["steps"] == steps
        assert torch.equal(rank[f"{name} on other ranks"]["weights"], start)
