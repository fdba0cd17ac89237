"""The example that README's first command trains."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("strategy", [["--strategy", "single"], ["--strategy", "ddp", "--devices", "2"]], ids=["single", "ddp"])
def test_digits_reach_their_accuracy(tmp_path, strategy):
    out = tmp_path / "run"
    command = [sys.executable, "examples/digits.py", "--max-epochs", "20", "--seed", "1", "--output", str(out), *strategy]
    result = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stderr
    assert "val_acc" in result.stdout  # the closing table
    assert json.loads((out / "summary.json").read_text())["metrics"]["val_acc"] >= 0.97
