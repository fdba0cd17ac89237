"""What four ranks came to in ``weights_program.py``: one program for all tests of the algorithms that exchange weights."""

import functools
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
RANKS = 4
#: Seconds; on two idle cores the program takes 20.
DEADLINE = 240


@functools.cache
def found():
    """By rank, the results by the case's name."""
    with tempfile.TemporaryDirectory() as folder:
        _run(folder)
        return [torch.load(Path(folder) / f"found-{rank}.pt") for rank in range(RANKS)]


def _run(folder):
    command = [sys.executable, str(HERE / "weights_program.py"), folder]
    log = Path(folder) / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=out, stderr=out, start_new_session=True)
        try:
            code = process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:  # the ranks are in its session
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert code == 0, log.read_text(errors="replace")
