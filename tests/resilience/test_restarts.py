"""The plugin of ``--max-restarts``: refusals, and the files of metrics of a run that goes on."""

import os
import sys

import pytest
from small_models import Logging, loader, trainer

import geartrain as gt
from geartrain import hookimpl
from geartrain.callbacks import ModelCheckpoint
from geartrain.loggers import CSVLogger
from geartrain_resilience.exchange import Attempt, Steps
from geartrain_resilience.restarts import shorten


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "needs a command line"),
        ("--no-output", "max_restarts=2 needs a folder for the run"),
        ("--fast-dev-run", "fast_dev_run saves nothing"),
        ("--num-nodes 2 --strategy ddp --output runs/1", "torchrun --nnodes 2 --max-restarts 2"),
        ("--max-restarts -1", "must be a whole number, at least 0"),
    ],
)
def test_refusals(command, installed, options, message):
    installed |= {"geartrain-ddp", "geartrain-parallel", "geartrain-resilience"}
    done = command(f"fit net.py --max-epochs 1 --max-restarts 2 {options}")
    expected = message if options else "under pytest it would run the tests again"
    assert done.code == 2
    assert expected in done.err
    assert "the module is made" not in done.out


def test_under_torchrun_the_launcher_restarts(monkeypatch, tmp_path):
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**place, "TORCHELASTIC_RUN_ID": "1"}.items():
        monkeypatch.setenv(name, value)
    one = trainer(max_restarts=2, output=tmp_path / "run")
    with pytest.raises(gt.UsageError, match="Fix: torchrun --max-restarts 2, and --resume auto"):
        one.fit(Logging(), loader())


def test_a_script_without_a_command_line_is_refused(tmp_path):
    one = trainer(max_restarts=2, output=tmp_path / "run")
    with pytest.raises(gt.UsageError, match=r"geartrain\.cli\(Module\)"):
        one.fit(Logging(), loader())


class Fails:
    """Fails once in the step with this number."""

    def __init__(self, step):
        self.step = step

    @hookimpl
    def on_train_batch_start(self, run):
        if run.step + 1 == self.step:
            raise RuntimeError("a fault")


def train(output, plugins, **options):
    more = {"log_every_n_steps": 1, "max_epochs": 3, "seed": 1, **options}
    one = trainer(output=output, plugins=plugins, max_restarts=3, **more)
    module = Logging(
        lambda self, batch, idx: self.log("loss", self.loss(batch)),
        lambda self, batch, idx: self.log("val_loss", self.loss(batch)),
    )
    return lambda path=None: one.fit(module, loader(), loader(), ckpt_path=path)


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """``attempt(1)``: make this process the attempt with this number."""
    Steps(tmp_path, 1)

    def set_number(number):
        value = Attempt(sys.orig_argv[1:], {}, str(tmp_path), os.getppid(), number, 3, "It failed")
        monkeypatch.setenv("GEARTRAIN_ATTEMPT", value.variable()["GEARTRAIN_ATTEMPT"])

    return set_number


@pytest.mark.parametrize("step", [1, 3, 6, 7, 11, 18])
@pytest.mark.parametrize("saves", ["epoch", "steps", "validations"])
def test_the_metrics_of_a_run_that_goes_on_have_no_gap_and_no_doubled_step(
    tmp_path, attempt, step, saves, capsys
):
    options = {"val_check_interval": 3} if saves == "validations" else {}

    def plugins():
        every = {"every_n_train_steps": 2} if saves == "steps" else {}
        best = [ModelCheckpoint(save_last=True, **every)] if saves != "epoch" else []
        return [*best, CSVLogger()]

    attempt(0)
    train(tmp_path / "whole", plugins(), **options)()
    with pytest.raises(RuntimeError, match="a fault"):
        train(tmp_path / "run", [Fails(step), *plugins()], **options)()
    attempt(1)
    train(tmp_path / "run", plugins(), **options)("auto")
    for name in ("metrics.jsonl", "metrics.csv"):
        assert (tmp_path / "run" / name).read_text() == (tmp_path / "whole" / name).read_text()
    assert "geartrain: restart 1 of 3: It failed. The run goes on from s" in capsys.readouterr().err


def test_lines_of_an_earlier_part_of_the_run_stay(tmp_path, attempt):
    """The user resumes a run without checkpoints of this plugin, and it fails before the next."""
    file = tmp_path / "file"
    file.write_text("a\nb\nc\n")
    shorten(file, 2)
    assert file.read_text() == "a\nb\n"
    shorten(file, 7)
    assert file.read_text() == "a\nb\n"


def test_each_rank_writes_its_step(tmp_path):
    steps = Steps(tmp_path, 2)
    Steps(tmp_path).write(1, 41)
    assert steps.read() == [0, 41]
