"""What four ranks came to in ``weights_program.py``: one program for all tests of the algorithms that exchange weights."""

import functools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

HERE = Path(__file__).parent
RANKS = 4
#: The program takes half a minute on two cores.
DEADLINE = 110


@functools.cache
def found():
    """By rank, the results by the case's name."""
    with tempfile.TemporaryDirectory() as folder:
        _run(Path(folder))
        return [torch.load(Path(folder) / f"found-{rank}.pt") for rank in range(RANKS)]


def _run(folder):
    logs = [folder / f"log-{rank}" for rank in range(RANKS)]
    processes = []
    end = time.monotonic() + DEADLINE
    try:
        for rank, log in enumerate(logs):
            environment = {**os.environ, "RANK": str(rank), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, str(HERE / "weights_program.py"), str(folder)]
            with log.open("wb") as out:
                processes.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT))
        while any(process.poll() is None for process in processes):
            assert time.monotonic() < end, _told(logs)
            assert not any(process.poll() for process in processes), _told(logs)
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * RANKS, _told(logs)


def _told(logs):
    time.sleep(0.5)  # the others' errors tell more than the first one's
    return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')}" for log in logs)
