"""``gt.cli``: the options of ``geartrain fit`` for a user's script, here ``net.py``."""

import json

import pytest
import torch

import geartrain as gt
from geartrain_cli.target import find_target

SEEDED = [
    "--max-epochs",
    "2",
    "--seed",
    "3",
    "--enable-progress-bar",
    "false",
    "--model.hidden",
    "6",
    "--data.batch-size",
    "8",
]


@pytest.mark.end_to_end
def test_a_script_trains_and_tests_as_the_command_does(python, command, folder):
    """The weights are bitwise equal, and so are the metrics."""
    assert command(" ".join(["fit net.py --output by_command", *SEEDED])).code == 0
    script = python("net.py", *SEEDED, "--output", "by_script")
    assert script.returncode == 0, script.stderr
    a, b = (
        torch.load(folder / run / "last.ckpt", weights_only=True)["model"]
        for run in ("by_command", "by_script")
    )
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    tested = python(
        "net.py",
        "test",
        "--checkpoint",
        "by_command/last.ckpt",
        "--model.hidden",
        "6",
        "--output",
        "tested",
    )
    assert tested.returncode == 0, tested.stderr
    of = {
        run: json.loads((folder / run / "summary.json").read_text())
        for run in ("by_command", "tested")
    }
    assert of["tested"]["command"] == "test"
    assert of["tested"]["metrics"]["val_loss"] == pytest.approx(
        of["by_command"]["metrics"]["val_loss"], rel=1e-6
    )


@pytest.mark.end_to_end
def test_a_script_exits_as_the_command_does(python):
    wrong = python("net.py", "--max-epoch", "2")
    assert wrong.returncode == 2
    assert "Traceback" not in wrong.stderr
    assert wrong.stderr.startswith("geartrain fit: ")
    assert "max_epochs" in wrong.stderr


@pytest.fixture
def cli(folder):
    """Return ``cli("--seed", "1")``, which calls ``gt.cli`` as a script does, in this process."""
    return lambda *argv: gt.cli(*find_target("net.py"), argv=argv)


def test_cli_gives_the_trainer_after_a_run_that_equals_the_commands(cli, command):
    assert command(" ".join(["fit net.py --output out", *SEEDED])).code == 0
    trainer = cli(*SEEDED)
    saved = torch.load("out/last.ckpt", weights_only=True)["model"]
    weights = trainer.run.module.state_dict()
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[name], weights[name]) for name in saved)
    assert isinstance(trainer, gt.Trainer)
    assert (trainer.global_step, trainer.current_epoch) == (4, 2)
    assert set(trainer.callback_metrics) == {"train_loss", "val_loss"}


@pytest.mark.parametrize("name", ["fit", "validate", "test", "predict"])
def test_the_first_argument_may_be_a_command(cli, name):
    assert cli(name, "--fast-dev-run", "--enable-progress-bar", "false").run.command == name


def test_explain_of_a_script_starts_nothing(cli, capsys):
    cli("explain", "--json", "--max-epochs", "2", "--data.batch-size", "8")
    printed = capsys.readouterr().out
    assert json.loads(printed)["options"]["max_epochs"] == 2
    assert json.loads(printed)["batch_size"]["per_device"] == 8


def test_options_are_those_of_the_command(cli, command, capsys):
    def options(text):
        return {word.strip("[],") for word in text.split() if word.startswith(("--", "[--"))}

    with pytest.raises(SystemExit) as end:
        cli("--help")
    assert not end.value.code
    of_script = options(capsys.readouterr().out)
    assert {"--model.hidden", "--data.batch-size", "--strategy"} <= of_script
    assert of_script == options(command("fit net.py --help").out)


def test_wrong_usage_exits_with_2(cli, capsys):
    with pytest.raises(SystemExit) as end:
        cli("--strategy", "sngle")
    assert end.value.code == 2
    assert "'single'" in capsys.readouterr().err


def test_a_failed_run_exits_with_1(capsys):
    class NoGrad(gt.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(1))

        def training_step(self, batch, batch_idx):
            return self.w.detach().sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def train_dataloader(self):
            return [torch.zeros(1)]

    with pytest.raises(SystemExit) as end:
        gt.cli(NoGrad, argv=["--max-epochs", "1"])
    assert end.value.code == 1
    assert "requires_grad=False" in capsys.readouterr().err


def test_a_script_takes_traceback_too(cli, capsys):
    with pytest.raises(SystemExit) as end:
        cli("--strategy", "sngle", "--traceback")
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("Traceback (most recent call last):")
    assert "\ngeartrain fit: there is no strategy 'sngle'" in error


def test_defaults_are_under_config_files_and_the_command_line(folder, monkeypatch):
    (folder / "conf.yaml").write_text("max_epochs: 3\n")
    model, data = find_target("net.py")
    given = {"max-epochs": 2, "enable_progress_bar": False, "seed": 5, "data": {"batch_size": 8}}

    def options(*argv):
        plan = gt.cli(model, data, argv=["explain", "--json", *argv], defaults=given).plan
        return plan.options.max_epochs, plan.options.seed, plan.per_device_batch

    assert options() == (2, 5, 8)
    assert options("--config", "conf.yaml") == (3, 5, 8)
    assert options("--config", "conf.yaml", "--max-epochs", "4", "--seed", "1") == (4, 1, 8)


def test_a_default_that_is_an_object_is_an_error(capsys):
    with pytest.raises(SystemExit):
        gt.cli(*find_target("net.py"), argv=[], defaults={"callbacks": [object()]})
    assert "an option is not text, number, list or mapping" in capsys.readouterr().err
