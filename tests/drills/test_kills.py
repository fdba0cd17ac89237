"""A few cases of the drills that kill processes at random moments."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.drill
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("script", "cases", "kills"), [("elastic_kills.py", "4", "5"), ("kill_and_resume.py", "5", "2")]
)
def test_killed_runs_end_as_whole_ones(script, cases, kills):
    program = Path(__file__).with_name(script)
    command = [sys.executable, program, "--seed", "1", "--cases", cases, "--kills", kills]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "'equal'" in done.stdout
