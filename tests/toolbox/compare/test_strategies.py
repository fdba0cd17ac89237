"""Test ``geartrain compare TARGET --strategies``: its arguments, figures and recommendation."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from small_models import Net, loader, trainer

from geartrain import TrainingError, UsageError
from geartrain_tools.compare import measures, strategies
from geartrain_tools.compare.command import command
from geartrain_tools.compare.measures import Measures
from geartrain_tools.compare.strategies import Row, facts_of, read_choices, recommendation


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("single,dpp", "no strategy 'dpp'.*Did you mean 'dp'"),
        ("single", "names fewer than two.*Fix"),
        ("", "names fewer than two.*Fix"),
        ("dp,single,dp", "names dp twice.*Fix"),
        ("single,ddp:timeout", "'timeout' has no value.*Fix: ddp:OPTION=VALUE"),
        ("single,ddp:timeout=", "'timeout' has no value.*Fix"),
        ("single,ddp:", "'' has no value.*Fix"),
    ],
)
def test_wrong_strategies_are_one_error(text, message):
    with pytest.raises(UsageError, match=message):
        read_choices(text)


def test_options_of_strategies():
    first, second = read_choices("bagua:algorithm=bytegrad:hierarchical=false, bagua")
    assert first.arguments() == [
        *("--strategy", "bagua", "--strategy.algorithm", "bytegrad"),
        *("--strategy.hierarchical", "false"),
    ]
    assert second.arguments() == ["--strategy", "bagua"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.py"], "no strategies, and 'train.py' are not the folders of two runs.*Fix"),
        (["train.py", "--strategies", "single,dp", "--steps", "1"], "too few. Fix: 2 or more"),
        (["train.py", "--strategies", "single,dp", "--rounds", "0"], "too few. Fix: 1 or more"),
        (
            ["train.py", "--strategies", "single,dp", "--output", "x"],
            "sets --output itself",
        ),
        (
            ["train.py", "--strategies", "single,dp", "--max_steps=3"],
            "sets --max_steps=3 itself",
        ),
    ],
)
def test_wrong_arguments_are_one_error(arguments, message):
    with pytest.raises(UsageError, match=message):
        command("compare", arguments)


def test_a_folder_with_files_is_not_overwritten(tmp_path):
    (tmp_path / "kept").write_text("")
    with pytest.raises(UsageError, match="is not empty"):
        command("compare", ["a.py", "--strategies", "single,dp", "--keep", str(tmp_path)])


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """Return a function that trains in this process and returns the run's row."""
    monkeypatch.setenv(measures.STARTED, "0")

    def train(**options):
        trainer(output=tmp_path, plugins=[Measures()], **options).fit(Net(), loader(batch_size=4))
        row = Row(read_choices("single,dp")[0])
        row.add(tmp_path / measures.FOLDER)
        return row

    return train


def test_a_run_is_measured(measure):
    measured = measure(max_epochs=2)
    facts = json.loads(json.dumps(facts_of([measured])))[0]
    assert len(measured.losses) == len(measured.times) > 3
    assert facts["samples_per_second"] > 0
    assert facts["memory"] > 1e6
    assert facts["loss"] == pytest.approx(measured.losses[-1], rel=1)
    assert not math.isnan(facts["loss_after_equal_time"])


def test_a_run_of_one_step_is_a_failure(measure):
    assert "one step" in facts_of([measure(max_steps=1)])[0]["error"]


def fact(name, speed, loss, memory=100, spread=0.01):
    return {
        "strategy": name,
        "samples_per_second": speed,
        "slowest_and_fastest": [speed * (1 - spread), speed * (1 + spread)],
        "memory": memory,
        "loss_after_equal_time": loss,
        "equal_time": 3.0,
    }


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ([fact("ddp", 200, 0.5), fact("fsdp", 100, 0.5)], "take ddp; 2.00 times .* of fsdp"),
        # Fewer samples a second, and yet a lower loss in the same time.
        ([fact("async", 200, 0.9), fact("ddp", 100, 0.5)], "take ddp; 0.50 times .* of async"),
        ([fact("ddp", 101, 0.5), fact("dp", 100, 0.5)], "which the rounds do not tell apart"),
        ([fact("ddp", 200, 0.5), fact("fsdp", 100, 0.5, 60)], "fsdp needs 0.60 of its memory"),
        ([fact("ddp", 200, math.nan), fact("dp", 100, math.nan)], r"take ddp; 2.00 .* of dp\.$"),
        ([fact("ddp", 200, 0.5), {"strategy": "dp", "error": "no"}], "take ddp; after 3.0 s"),
        ([{"strategy": "dp", "error": "no"}], "no strategy trained"),
    ],
)
def test_a_recommendation_states_its_evidence(facts, words):
    assert re.search(words, recommendation(facts))


def test_strategies_run_in_turns_and_a_failed_strategy_does_not_run_again(tmp_path, monkeypatch):
    runs = []

    def run(choice, fit, output):
        runs.append((choice.text, output.name))
        return "OSError: no" if choice.name == "dp" else "no files"

    monkeypatch.setattr(strategies, "run", run)
    choices = read_choices("dp,single")
    rows = strategies.compare_strategies(choices, ["fit"], tmp_path, 2)
    assert runs == [("dp", "dp-1"), ("single", "single-1")]
    assert [row.error for row in rows] == ["OSError: no", "no files"]


PROGRAM = """
import torch, geartrain as gt
from torch.utils.data import DataLoader, TensorDataset

class Net(gt.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 1)
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.rand(64, 3), torch.rand(64, 1)), batch_size=4)
    def training_step(self, batch, batch_idx):
        x, y = batch
        return (self.net(x) - y).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
"""


@pytest.mark.end_to_end
def test_the_command_compares_and_shows_failures_as_rows(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [Path(sys.executable).with_name("geartrain"), "compare", "train.py", "--devices", "2"]
    command += ["--accelerator", "cpu", "--strategies", "single,dp,dp:option=1"]
    command += ["--steps", "6", "--rounds", "1", "--json", "--keep", "runs"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=200, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    single, dp, failed = facts["strategies"]
    assert min(one["samples_per_second"] for one in (single, dp)) > 0
    assert "takes no options" in failed["error"]
    assert facts["recommendation"].startswith("take ")
    assert len(list((tmp_path / "runs").glob("*/metrics.jsonl"))) <= 2
    assert (tmp_path / "runs" / "single-1" / "plan.json").exists()


def test_if_all_fail_the_command_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(strategies, "run", lambda *_: "OSError: no")
    with pytest.raises(TrainingError, match="no strategy trained: single: OSError: no"):
        command("compare", ["train.py", "--strategies", "single,dp"])
    assert "OSError: no" in capsys.readouterr().out
