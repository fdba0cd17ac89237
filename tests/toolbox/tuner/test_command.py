"""``geartrain tune lr`` and ``geartrain tune batch-size``: output, files, errors, options."""

import csv
import itertools
import json

import pytest

import geartrain as gt

LR = (
    "tune lr net.py --accelerator cpu --seed 1 --data.samples 256 --data.batch-size 64 "
    "--min-lr 1e-4 --num-training 40"
)
SIZE = "tune batch-size net.py --accelerator cpu --seed 1 --data.samples 24"


@pytest.fixture
def facts(command):
    """Return a function: ``facts("tune lr net.py")`` gives the JSON that the command printed."""

    def run(line):
        done = command(f"{line} --json")
        assert done.code == 0, done.err
        return json.loads(done.out[done.out.index("{") :])

    return run


def test_lr_prints_the_option_to_use_and_the_curve(command, facts, folder):
    before = set(folder.iterdir())
    found, done = facts(LR), command(LR)
    assert done.code == 0, done.err
    assert (
        f"learning rate: {found['suggestion']:.3g}, at which the loss fell fastest in 40 steps"
        in done.out
    )
    assert f"use it: --model.lr {found['suggestion']:.3g}\n" in done.out
    assert done.out.count("*") > 20
    assert {path for path in folder.iterdir() if path.name != "__pycache__"} == before
    assert found["lrs"][0] == pytest.approx(1e-4)
    assert found["lrs"][-1] == pytest.approx(1)
    assert len(found["lrs"]) == len(found["losses"]) == len(found["raw_losses"]) == 40
    assert 1e-4 < found["suggestion"] < 1
    assert (found["mode"], found["stopped"], found["why_not"], found["doubt"]) == (
        "exponential",
        "",
        "",
        "",
    )


def test_lr_options_reach_the_finder(facts):
    found = facts(f"{LR} --mode linear --max-lr 0.5 --num-training 15 --early-stop-threshold null")
    assert [round(b - a, 6) for a, b in itertools.pairwise(found["lrs"])] == [
        round((0.5 - 1e-4) / 14, 6)
    ] * 14
    assert found["mode"] == "linear"
    steep = f"{LR} --max-lr 1e6 --early-stop-threshold"
    early, late = facts(f"{steep} 1.01"), facts(f"{steep} 100")
    assert len(early["lrs"]) < len(late["lrs"])
    assert early["stopped"].startswith("the loss diverged")


def test_a_doubtful_suggestion_is_marked(command):
    done = command(
        "tune lr net.py --accelerator cpu --seed 1 --data.samples 256 --data.batch-size 4"
    )
    assert done.code == 0
    assert "do not trust it: the loss is noisy" in done.out
    assert "\nto use it nevertheless: --model.lr " in done.out


def test_lr_output_holds_the_curve(command, facts, folder):
    found = facts(f"{LR} --output out")
    assert {path.name for path in (folder / "out").iterdir()} == {"lr.json", "lr.csv"}
    assert json.loads((folder / "out" / "lr.json").read_text()) == found
    with (folder / "out" / "lr.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["lr"]) for row in rows] == found["lrs"]
    assert [float(row["loss"]) for row in rows] == found["losses"]
    assert [float(row["raw_loss"]) for row in rows] == found["raw_losses"]
    again = command(f"{LR} --output out")
    assert again.code == 2
    assert "exists, and nothing is overwritten" in again.err
    assert "the module is made" not in again.out


def test_trainer_options_reach_the_finder(facts):
    plain = facts(LR)
    assert facts(LR) == plain
    assert facts(f"{LR} --accumulate-grad-batches 4")["raw_losses"] != plain["raw_losses"]
    assert facts(f"{LR} --model.hidden 2")["raw_losses"] != plain["raw_losses"]


def test_a_config_file_of_a_run_is_taken_and_one_of_tune_by_fit(facts, command, write, folder):
    write(
        "run.yaml",
        "max_epochs: 1\nplugins: [csv]\ncsv: {path: metrics.csv}\n"
        "data: {samples: 256, batch_size: 64}\nmin_lr: 0.001\n",
    )
    found = facts("tune lr net.py --config run.yaml --accelerator cpu --num-training 20")
    assert found["lrs"][0] == pytest.approx(1e-3)
    assert len(found["lrs"]) == 20
    assert not (folder / "metrics.csv").exists()
    done = command("tune lr net.py --num-training 20 --print-config")
    write("tune.yaml", done.out)
    assert (
        command("fit net.py --config tune.yaml --fast-dev-run --enable-progress-bar false").code
        == 0
    )


def test_weights_to_start_from(facts, command):
    assert (
        command(
            "fit net.py --max-epochs 3 --output out --enable-progress-bar false --data.samples 256"
        ).code
        == 0
    )
    assert facts(f"{LR} --checkpoint out/last.ckpt")["raw_losses"][0] < facts(LR)["raw_losses"][0]


def test_without_a_learning_rate_argument_the_output_names_configure_optimizers(command, write):
    write(
        "fixed.py",
        "import torch\nfrom net import Data as D, Net\nclass Fixed(Net):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        del self.lr\n    def configure_optimizers(self):\n"
        "        return torch.optim.SGD(self.parameters(), lr=0.1)\n"
        "    def train_dataloader(self): return D(64, 256).train_dataloader()\n",
    )
    done = command("tune lr fixed.py --accelerator cpu --min-lr 1e-4 --num-training 30 --seed 1")
    assert done.code == 0, done.err
    assert "in configure_optimizers; the module's __init__ has no lr or learning_rate" in done.out


def test_nothing_found_is_a_failure(command, write, folder):
    write(
        "flat.py",
        "from net import *\nclass Flat(Net):\n"
        "    def training_step(self, b, i): return self.layers[0].weight.sum() * 0 + 1\n",
    )
    write(
        "flat.py",
        (folder / "flat.py").read_text()
        + "    def train_dataloader(self): return Data().train_dataloader()\n",
    )
    done = command("tune lr flat.py --accelerator cpu --num-training 20 --json")
    assert done.code == 1
    assert "geartrain tune: no learning rate is suggested: the loss fell nowhere" in done.err
    assert json.loads(done.out[done.out.index("{") :])["suggestion"] is None


# --- batch-size -----------------------------------------------------------------------------------

SMALL = """
import torch
from net import *

class Small(Net):
    '''One with room for ten samples.'''

    def training_step(self, batch, batch_idx):
        if len(batch[0]) > 10:
            raise MemoryError("no room")
        return super().training_step(batch, batch_idx)

class D(Data):
    pass
"""


def test_batch_size_prints_the_option_to_use(command):
    done = command(SIZE)
    assert done.code == 0, done.err
    assert "batch size: 24 on one device; the data has only 24 samples" in done.out
    assert "use it: --data.batch_size 24\n" in done.out
    assert "The learning rate belongs to a batch size" in done.out
    assert done.err.count("samples/s") == 5


def test_batch_size_searches(command, facts, write, folder):
    write("small.py", SMALL)
    line = (
        "tune batch-size small.py --accelerator cpu --data.samples 24 --enable-progress-bar false"
    )
    found = facts(f"{line} --output out")
    assert found["batch_size"] == 8
    assert found["reason"] == "16 does not run"
    assert [trial["batch_size"] for trial in found["trials"]] == [2, 4, 8, 16]
    assert [trial["error"] for trial in found["trials"]] == ["", "", "", "no room"]
    assert all(trial["samples_per_second"] > 0 for trial in found["trials"][:-1])
    assert json.loads((folder / "out" / "batch_size.json").read_text()) == found
    assert facts(f"{line} --mode binsearch --init-val 3")["batch_size"] == 10
    assert facts(f"{line} --max-trials 2")["batch_size"] == 4
    done = command(line)
    assert "no room" in done.out
    assert done.err == ""


def test_batch_size_of_the_module(command, write):
    write(
        "own.py",
        "from torch.utils.data import DataLoader\nfrom net import Data as D, Net\nclass Own(Net):\n"
        "    def __init__(self, size: int = 2):\n        super().__init__()\n"
        "        self.size = size\n"
        "    def train_dataloader(self): return DataLoader(D(1, 24).samples, "
        "batch_size=self.size)\n",
    )
    done = command(
        "tune batch-size own.py --accelerator cpu --batch-arg-name size --steps-per-trial 1"
    )
    assert done.code == 0, done.err
    assert "use it: --model.size 24\n" in done.out


def test_no_batch_size_runs(command, write):
    write("small.py", SMALL.replace("> 10", "> 0"))
    done = command("tune batch-size small.py --accelerator cpu")
    assert done.code == 1
    assert "no batch size runs: 1 ran out of memory too (no room)" in done.err


# --- usage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tune", ["the first argument must be lr or batch-size", "geartrain tune lr TARGET"]),
        ("tune net.py", ["there is no 'net.py' to tune", "geartrain tune batch-size TARGET"]),
        ("tune batchsize net.py", ["Did you mean 'batch-size'?"]),
        ("tune lr", ["TARGET comes first: geartrain tune lr file.py"]),
        ("tune lr net.py --mode power", ["--mode", "exponential"]),
        ("tune lr net.py --init-val 3", ["--init_val"]),
        ("tune lr net.py --num-trainings 3", ["--num_trainings", "num_training"]),
        ("tune batch-size net.py --min-lr 3", ["--min_lr"]),
    ],
)
def test_wrong_usage(refused, line, expected):
    error = refused(line)
    assert all(word in error for word in expected), error


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tune lr net.py --num-training 3 --accelerator cpu", "at least 13"),
        ("tune batch-size net.py --init-val 0 --accelerator cpu", "at least 1"),
    ],
)
def test_a_search_that_cannot_work_starts_nothing(command, line, expected):
    done = command(line)
    assert done.code == 2
    assert expected in done.err


def test_help(command):
    done = command("tune --help")
    assert done.code == 0
    assert "geartrain tune lr TARGET" in done.out
    done = command("tune lr net.py --help")
    assert done.code == 0
    for option in (
        "--min-lr",
        "--early-stop-threshold",
        "--model.lr",
        "--data.batch-size",
        "--strategy",
        "--checkpoint",
    ):
        assert option in done.out
    assert "--init-val" in command("tune batch-size --help").out


def test_a_users_script_can_tune(folder, monkeypatch, capsys):
    monkeypatch.syspath_prepend(folder)
    from net import Data, Net

    trainer = gt.cli(Net, Data, ["tune", "batch-size", "--accelerator", "cpu"])
    assert trainer.global_step == 0
    assert "use it: --data.batch_size 16" in capsys.readouterr().out
