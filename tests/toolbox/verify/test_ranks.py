"""``geartrain verify ranks``: a difference is named with its first step, tensors and cause."""

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from small_models import Net, samples, trainer
from torch.utils.data import DataLoader, Dataset

import geartrain as gt
from geartrain_tools.verify.every_step import EveryStep
from geartrain_tools.verify.evidence import Evidence
from geartrain_tools.verify.ranks import CHECK, Trained, cause_of
from geartrain_tools.verify.runs import first_difference

calls = 0


class Logs(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class ClassAttribute(Logs):
    """Ranks of one process share the number by which it divides."""

    calls = 0

    def training_step(self, batch, batch_idx):
        type(self).calls += 1
        return super().training_step(batch, batch_idx) / type(self).calls


class GlobalVariable(Logs):
    def training_step(self, batch, batch_idx):
        global calls
        calls += 1
        return super().training_step(batch, batch_idx) / calls


class Threads(Logs):
    """Its second run, by the time of the test, sets another number of threads."""

    many = 0

    def on_train_start(self):
        torch.set_num_threads(1 + Threads.many)
        self.scale = 1.0 + Threads.many

    def training_step(self, batch, batch_idx):
        return self.scale * super().training_step(batch, batch_idx)


class Draws(Logs):
    """Draws more random numbers in its second run."""

    runs = 0

    def on_train_start(self):
        torch.rand(Draws.runs)


class OnlyLogs(Net):
    runs = 0

    def training_step(self, batch, batch_idx):
        self.log("runs", float(OnlyLogs.runs))
        return super().training_step(batch, batch_idx)


class Initial(Logs):
    runs = 0

    def on_train_start(self):
        torch.nn.init.constant_(self.layers[0].bias, Initial.runs)


class Counted(Dataset):
    count = 0

    def __len__(self):
        return 24

    def __getitem__(self, index):
        x, y = samples(24)[index]
        Counted.count += 1
        return x + Counted.count, y


def run(folder, module=Logs, data=None, **options):
    options = {"seed": 2, "log_every_n_steps": 1, "max_steps": 3, **options}
    one = trainer(output=folder, plugins=[EveryStep(), Evidence()], **options)
    one.fit(module(), DataLoader(data or samples(24), batch_size=4))
    return folder


def compare(first, second):
    def cause(step, names):
        return cause_of(step, names, Trained(1, first), Trained(2, second))

    return first_difference(first, second, cause, metrics=True)


@pytest.fixture
def restored(monkeypatch):
    """Restore class attributes, a global variable and the threads, which these modules change."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys.modules[__name__], "calls", 0)
    for cls, name in ((ClassAttribute, "calls"), (Counted, "count"), (Threads, "many")):
        monkeypatch.setattr(cls, name, 0)
    for cls in (Draws, OnlyLogs, Initial):
        monkeypatch.setattr(cls, "runs", 0)
    yield
    torch.set_num_threads(threads)


# Two runs in the test's process share class attributes and global variables, as ranks of one
# process do.
@pytest.mark.parametrize(
    ("module", "data", "second", "step", "name", "cause"),
    [
        (ClassAttribute, None, None, 1, "model.layers", "ClassAttribute.calls changes in training"),
        (GlobalVariable, None, None, 1, "model.layers", "calls changes in training, and ranks of"),
        (Logs, Counted, None, 1, "model.layers", "rank 0 gets another batch in step 1"),
        (Threads, None, (Threads, "many"), 1, "model.layers", "_threads() in rank 0 is 1 on 1 pro"),
        (Draws, None, (Draws, "runs"), 1, "ranks.0.random", "random numbers more or less often"),
        (OnlyLogs, None, (OnlyLogs, "runs"), 1, "metrics.runs", "something of the process, as os"),
        (Initial, None, (Initial, "runs"), 1, "model.layers", "something of the process, as os."),
    ],
)
def test_the_likely_cause_is_named(restored, tmp_path, module, data, second, step, name, cause):
    first = run(tmp_path / "first", module, data and data())
    if second is not None:
        setattr(*second, 1)
    found = compare(first, run(tmp_path / "second", module, data and data()))
    assert found.step == step
    assert any(each.startswith(name) for each in found.names)
    assert cause in found.text()


def test_equal_runs_have_no_difference(tmp_path):
    assert compare(run(tmp_path / "first"), run(tmp_path / "second")) is None


@pytest.mark.timeout(200)
def test_ranks_of_one_process_share_a_class_attribute(tmp_path):
    folders = [
        run(
            tmp_path / f"{devices}",
            ClassAttribute,
            strategy="elastic",
            devices=devices,
            strategy_options={"virtual_ranks": 2},
        )
        for devices in (1, 2)
    ]
    found = compare(*folders)
    assert found.step == 1
    assert any(name.startswith("model.layers.0") for name in found.names)
    assert "ClassAttribute.calls changes in training" in found.text()


# --- the command ----------------------------------------------------------------------------------

#: Takes the place of fit: copies the run whose name is that of the output.
COPY = """
import shutil, sys
from pathlib import Path
output = Path(sys.argv[-1])
source = Path(sys.argv[1], output.name)
shutil.copytree(source if source.exists() else source.with_name("1"), output)
"""


@pytest.fixture
def verified(tmp_path, capsys):
    """``verified({"1": folder, "2": folder})``: what verify finds in these runs, and its output."""

    def verify(runs, json=False):
        for name, folder in runs.items():
            Path(tmp_path, "runs").mkdir(exist_ok=True)
            Path(tmp_path, "runs", name).symlink_to(folder)
        fit = [sys.executable, "-c", COPY, str(tmp_path / "runs")]
        options = Namespace(devices=[1, 2], virtual_ranks=4, json=json)
        result = CHECK.run(fit, tmp_path / "copies", options)
        return result, capsys.readouterr().out

    return verify


def test_equal_runs(tmp_path, verified):
    folder = run(tmp_path / "a")
    result, printed = verified({"1": folder, "2": folder})
    lines = printed.splitlines()
    assert lines == [
        "on 1 process: 3 steps of 4 ranks",
        "on 2 processes: as on 1, equal in every bit",
    ]
    assert not result.failure


def test_a_difference(tmp_path, verified):
    a, b = run(tmp_path / "a"), run(tmp_path / "b", seed=3)
    result, printed = verified({"1": a, "2": b})
    assert "on 2 processes: differs from step 1 on, in model.layers" in printed
    assert "likely cause: a rank draws random numbers more or less often" in printed
    assert result.failure == "a run on 2 processes ends otherwise than on 1"


def test_runs_that_differ_on_the_same_number_of_processes(tmp_path, verified):
    a, b = run(tmp_path / "a"), run(tmp_path / "b", seed=3)
    result, printed = verified({"1": a, "2": b, "again": b}, json=True)
    assert not printed
    assert result.facts["equal"] is False
    first, second = result.facts["runs"]
    assert first == {"devices": 1, "equal": True}
    assert second["first"] == 1
    assert second["cause"].startswith("two runs on 1 process differ, too: no --seed, the time")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--devices 2", "--devices 2: not a list of numbers of processes. Fix: two or more"),
        ("--devices 0,2", "--devices 0,2: not a list of numbers of processes"),
        ("--devices 1,auto", "--devices 1,auto: not a list of numbers of processes"),
        ("--devices 1,4 --strategy.virtual_ranks 2", "2 are fewer than the 4 processes"),
        ("--strategy.virtual_ranks many", "invalid int value: 'many'"),
        ("--strategy ddp", "invalid choice: 'ddp'"),
        ("--accelerator cuda", "invalid choice: 'cuda'"),
        ("--output here", "sets --output itself"),
        (
            "--devices 1,2",
            "strategy 'elastic' is not installed. Fix: pip install geartrain-elastic",
        ),
    ],
)
def test_wrong_arguments_are_refused_before_a_run(refused, argv, message):
    assert message in refused(f"verify ranks net.py {argv}").replace("\n", " ")


def test_a_script_has_the_command(capsys):
    with pytest.raises(SystemExit) as ended:
        gt.cli(Net, argv=["verify", "ranks", "--devices", "2"], defaults={"seed": 1})
    assert ended.value.code == 2
    assert "--devices 2: not a list of numbers of processes" in capsys.readouterr().err


MODULE = """
import torch, geartrain as gt

class Net(gt.Module):
    calls = 0

    def __init__(self, shares: bool = False):
        super().__init__()
        self.layer, self.shares = torch.nn.Linear(2, 1), shares

    def training_step(self, batch, batch_idx):
        Net.calls += self.shares
        return self.layer(batch).mean() / (1 + Net.calls)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2)
"""


@pytest.mark.end_to_end
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("shares", "code", "message"),
    [
        ("false", 0, "on 2 processes: as on 1, equal in every bit"),
        ("true", 1, "Net.calls changes in training"),
    ],
)
def test_the_command_trains_and_compares(tmp_path, shares, code, message):
    (tmp_path / "net.py").write_text(MODULE)
    main = "import sys; from geartrain.commands import main; sys.exit(main())"
    argv = ["verify", "ranks", "net.py", "--steps", "2", "--seed", "1", "--model.shares", shares]
    done = subprocess.run(
        [sys.executable, "-c", main, *argv],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == code, done.stderr
    assert message in done.stdout
