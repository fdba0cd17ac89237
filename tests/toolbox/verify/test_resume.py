"""``geartrain verify resume``: a difference is named with its first step, tensors and cause."""

import random
import subprocess
import sys

import pytest
import torch
from small_models import Net, samples, trainer
from torch.utils.data import DataLoader, Dataset

from geartrain_tools.verify.every_step import EveryStep
from geartrain_tools.verify.resume import cause_of
from geartrain_tools.verify.runs import first_difference


class Forgets(Net):
    """Its learning rate falls by an attribute that no checkpoint has."""

    factor = 1.0

    def training_step(self, batch, batch_idx):
        self.factor *= 0.5
        return self.factor * super().training_step(batch, batch_idx)


class Noisy(Dataset):
    def __init__(self):
        self.samples, self.noise = samples(24), random.Random(0)

    def __len__(self):
        return 24

    def __getitem__(self, index):
        x, y = self.samples[index]
        return x + self.noise.random(), y


def steps(folder, module, data=None, path=None, max_steps=8):
    data = DataLoader(samples(24) if data is None else data, batch_size=4, shuffle=True)
    one = trainer(output=folder, plugins=[EveryStep()], seed=2, max_epochs=2, max_steps=max_steps)
    one.fit(module(), data, ckpt_path=path)
    return folder


@pytest.fixture
def resumed(tmp_path):
    """``resumed(module, data, after)``: the folders of a whole run and of one that resumes."""

    def make(module, data=lambda: None, after=3):
        whole = steps(tmp_path / "whole", module, data())
        path = whole / "steps" / f"{after}.ckpt"
        return whole, steps(tmp_path / "rest", module, data(), path)

    return make


@pytest.mark.parametrize("after", [3, 6, 7])
def test_a_run_that_resumes_exactly_has_no_difference(resumed, after):
    whole, rest = resumed(Net, after=after)
    assert first_difference(whole, rest, cause_of, after + 1) is None


def test_an_attribute_outside_the_state_is_named_as_the_cause(resumed):
    found = first_difference(*resumed(Forgets), cause_of, 4, "a.py:1: UserWarning: look\n  line\n")
    assert found.step == 4
    assert {name.split(".")[0] for name in found.names[:2]} == {"model"}
    assert "an attribute of the module outside state_dict()" in found.text()
    assert "the run warned: look" in found.text()


@pytest.mark.filterwarnings("ignore:the dataset of")
def test_a_generator_without_state_is_found(resumed):
    assert first_difference(*resumed(Net, Noisy, after=7), cause_of, 8) is not None


def test_a_run_that_ends_earlier_differs(tmp_path):
    whole = steps(tmp_path / "whole", Net)
    shorter = steps(tmp_path / "shorter", Net, max_steps=5)
    assert first_difference(whole, shorter, cause_of).names == ["the number of steps"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("verify", "Fix: geartrain verify resume|ranks TARGET"),
        ("verify resum net.py", "Did you mean 'resume'"),
        ("verify resume net.py --output here", "sets --output itself"),
        ("verify resume net.py --resume", "sets --resume itself"),
        ("verify resume net.py --kills 0", "--kills 0: not a number of runs"),
        ("verify resume net.py --steps -1", "--steps -1: not a number of steps"),
        ("verify resume net.py --kills many", "invalid int value: 'many'"),
    ],
)
def test_wrong_arguments_are_refused_before_a_run(folder, refused, argv, message):
    assert message in refused(argv)


def test_help_has_the_options(command):
    done = command("verify resume --help")
    assert "--kills" in done.out
    assert "geartrain verify resume train.py" in done.out


MODULE = """
import torch, geartrain as gt

class Net(gt.Module):
    def __init__(self, forgets: bool = False):
        super().__init__()
        self.layer, self.forgets, self.factor = torch.nn.Linear(2, 1), forgets, 1.0

    def training_step(self, batch, batch_idx):
        self.factor *= 0.5 if self.forgets else 1.0
        return self.factor * self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2)
"""


@pytest.mark.end_to_end
@pytest.mark.parametrize(("forgets", "code"), [("false", 0), ("true", 1)])
def test_the_command_trains_kills_resumes_and_compares(tmp_path, forgets, code):
    (tmp_path / "net.py").write_text(MODULE)
    main = "import sys; from geartrain.commands import main; sys.exit(main())"
    argv = ["verify", "resume", "net.py", "--kills", "1", "--steps", "5", "--seed", "1"]
    done = subprocess.run(
        [sys.executable, "-c", main, *argv, "--model.forgets", forgets],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, done.stderr
    assert ("equal in every bit" in done.stdout) is (code == 0)
    assert ("likely cause: an attribute" in done.stdout) is (code == 1)
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["net.py"]


def test_the_plugin_saves_each_step_in_a_fit(tmp_path):
    folder = steps(tmp_path / "run", Net, max_steps=2)
    assert sorted(path.name for path in (folder / "steps").iterdir()) == ["1.ckpt", "2.ckpt"]
    assert torch.load(folder / "steps" / "2.ckpt", weights_only=True)["step"] == 2
