"""The plugin in separate programs: command line, terminal, several processes, signals, leftovers.

The other files assert the same in the test's process.
"""

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from several_ranks import program, results

from geartrain_testing.launching import until

from .cases import geartrain
from .programs import train_for_ever, train_on_a_rank, train_twice
from .record import recorded

DOWNHILL = str(Path(__file__).parents[1] / "integration" / "downhill.py")
pytestmark = pytest.mark.end_to_end


def test_chosen_by_name(tmp_path):
    options = {"project": "p", "tags": "[a, b]", "mode": "offline", "checkpoints": "true"}
    given = [word for name, value in options.items() for word in (f"--wandb.{name}", value)]
    arguments = ["--max-epochs", "2", "--plugin", "wandb", "--output", "out", *given]
    done = geartrain("fit", DOWNHILL, *arguments)
    assert done.end == "0", done.printed
    (run,) = recorded(tmp_path / "out")
    assert (run.run.project, list(run.run.tags), run.exit_code) == ("p", ["a", "b"], 0)
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert len(run.rows) == len([json.loads(line) for line in lines])
    assert len(run.of("artifact")) == 2


def test_without_a_key_no_prompt_appears_at_a_terminal(tmp_path):
    mother, child = pty.openpty()
    code = "import sys; from geartrain.commands import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "fit", DOWNHILL, "--plugin", "wandb", "--output", "out"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=child, timeout=60)
    os.close(mother)
    os.close(child)
    assert done.returncode == 2
    for words in ("geartrain-wandb[wandb]: you are not logged in", "--wandb.mode offline"):
        assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.rglob("core-debug*"))  # the first file that wandb's service writes


def test_after_the_run_wandb_has_no_process_left(tmp_path):
    results(tmp_path, train_twice, ranks=1, place="alone")
    assert [run.exit_code for run in recorded(tmp_path)] == [0, 0]


def test_only_the_first_of_two_ranks_has_a_run(tmp_path):
    assert results(tmp_path, train_on_a_rank) == [True, False]
    (run,) = recorded(tmp_path)
    assert [row["trainer/global_step"] for row in run.rows if "loss_step" in row] == [1, 2, 3, 4]
    assert run.config["geartrain"]["processes"] == 2


def test_ctrl_c_marks_the_run_and_leaves_no_process(tmp_path):
    with program(tmp_path, train_for_ever) as started:
        until((tmp_path / "going").exists, 60, "the first batch")
        started.process.send_signal(signal.SIGINT)
        started.wait(60)
        assert not started.left_behind()
    (run,) = recorded(tmp_path)
    assert run.exit_code == 255
    assert run.summary["geartrain/status"] == "interrupted"
