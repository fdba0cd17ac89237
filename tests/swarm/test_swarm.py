"""Random programs across every border; see program.py, borders.py and draws.py.

A draw that fails is run again with ``python tests/swarm --draw "TEXT"``.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from geartrain_testing.launching import HAS_PROC

from .borders import BORDERS

#: Draws that were wrong before a fault was mended.
MENDED = [
    "killed single scheduler=MultiStepLR",
    "epochs single scheduler=SequentialLR(MultiStepLR,StepLR)",
    "fits single plugins=early_stopping",
    "error single validation=rare moment=validation saved=now plugins=model_checkpoint",
    "killed single loader=shuffled validation=half moment=validation saved=now",
    "sanity single plugins=activation_checkpointing+activation_checkpointing",
    "ranks threads optimizer=SparseAdam",
    "death elastic hook=on_train_epoch_start",
    "evaluate single plugins=ema hook=on_save_checkpoint",
    "sanity single scheduler=LambdaLR plugins=backbone_finetuning+swa",
    "death elastic loader=stateful",
    "ranks ddp_sharded hook=on_before_backward",
]

pytestmark = [
    pytest.mark.skipif(not HAS_PROC, reason="forks"),
    pytest.mark.timeout(1800),
]


def outcomes(folder: Path, *arguments: str) -> list[dict[str, str]]:
    """Run the swarm in a process that forks, and return its lines."""
    file = folder / "outcomes.json"
    subprocess.run(
        [sys.executable, str(Path(__file__).parent), "--json", str(file), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        timeout=1700,
        check=False,
    )
    lines: list[dict[str, str]] = json.loads(file.read_text())
    return lines


def failures(lines: list[dict[str, str]]) -> list[str]:
    return [
        f"{line['number']} {line['outcome']}: {line['draw']}\n{line['text']}"
        for line in lines
        if line["outcome"] in ("wrong", "hang")
    ]


def test_a_border_changes_no_result(tmp_path):
    lines = outcomes(tmp_path, "--draws", "15", "--in-process")
    assert len(lines) == 15
    assert failures(lines) == []
    assert sum(line["outcome"] == "equal" for line in lines) > 6


def test_a_mended_fault_stays_mended(tmp_path):
    lines = outcomes(tmp_path, *(word for text in MENDED for word in ("--draw", text)))
    assert [line for line in lines if line["outcome"] != "equal"] == []


@pytest.mark.drill
@pytest.mark.parametrize("border", BORDERS)
def test_many_draws_across_a_border(border, tmp_path):
    number = "6" if border == "death" else "30"
    assert failures(outcomes(tmp_path, "--draws", number, "--seed", "1", "--border", border)) == []
