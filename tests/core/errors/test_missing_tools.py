"""Core alone: each name of another distribution's tool has an error with ``pip install``."""

import importlib
import re
import sys

import pytest
import torch
from command_line import distribution_of
from small_models import Net, loader  # before ``alone``: it needs geartrain.parallel

import geartrain as gt
import geartrain_callbacks
import geartrain_cli  # noqa: F401 (see alone)
import geartrain_parallel
import geartrain_testing
import geartrain_tools.tuner
from geartrain.commands import main
from geartrain.errors.known import KNOWN
from geartrain.planning import registry
from geartrain.planning.lazy_exports import entry_points

TOOLS = {
    "geartrain.callbacks": geartrain_callbacks,
    "geartrain.parallel": geartrain_parallel,
    "geartrain.testing": geartrain_testing,
    "geartrain.tuning": geartrain_tools.tuner,
}


class Without:
    """A finder of modules for which packages are not installed."""

    def __init__(self, *packages):
        self.packages = packages

    def find_spec(self, name, path, target=None):
        if name in self.packages:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def remove(monkeypatch, *packages):
    """Make packages of geartrain look as if they were not installed."""
    removed = [f"geartrain_{package}" for package in packages]
    for name in [name for name in sys.modules if name.partition(".")[0] in removed]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Without(*removed), *sys.meta_path])


@pytest.fixture
def alone(monkeypatch):
    """Core finds only the distribution of the command line, and none of its commands."""
    remove(monkeypatch, "callbacks", "parallel", "port", "session", "testing", "tools")

    def own(**wanted):
        return [ep for ep in entry_points(**wanted) if distribution_of(ep) == "geartrain"]

    for module in (
        "geartrain.planning.registry",
        "geartrain.planning.lazy_exports",
        "geartrain.errors.hints",
    ):
        monkeypatch.setattr(f"{module}.entry_points", own)
    monkeypatch.setattr("geartrain.metrics.objects._declared", tuple)
    for name in ("CombinedLoader", "Session", "Fabric", "cli"):
        monkeypatch.delitem(vars(gt), name, raising=False)


@pytest.fixture
def no_command_line(alone, monkeypatch):
    """Not even geartrain-cli is installed."""
    remove(monkeypatch, "cli")


@pytest.mark.parametrize("module", TOOLS)
def test_a_name_of_a_tool(alone, module):
    home = TOOLS[module].__name__.partition(".")[0].replace("_", "-")
    for name in (name for name in TOOLS[module].__all__ if not name.startswith("__")):
        message = f"^{module} is not installed. Fix: pip install {home}$"
        with pytest.raises(ImportError, match=message):
            getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(
    ("name", "home"),
    [("Session", "session"), ("Fabric", "session"), ("CombinedLoader", "callbacks")],
)
def test_a_class_of_another_distribution(alone, name, home):
    message = f"^geartrain.{name} is not installed. Fix: pip install geartrain-{home}$"
    with pytest.raises(ImportError, match=message):
        getattr(gt, name)


def test_loaders_that_need_a_combined_loader(alone):
    message = r"CombinedLoader, for a dict to train on, is not .* pip install geartrain-callbacks$"
    with pytest.raises(gt.UsageError, match=message):
        gt.Trainer(accelerator="cpu").fit(Net(), {"a": loader(), "b": loader()})


def test_a_model_that_is_no_module_of_geartrain(alone):
    message = r"^fit of Linear, which is no geartrain.Module, .* pip install geartrain-callbacks$"
    with pytest.raises(gt.UsageError, match=message):
        gt.Trainer(accelerator="cpu").fit(torch.nn.Linear(3, 1), loader(), loss=sum, optimizer=sum)


def test_a_plugin_in_a_file(no_command_line):
    message = r"^the reader of plugins in files, my.py, is not .* pip install geartrain-cli$"
    with pytest.raises(gt.UsageError, match=message):
        gt.Trainer(accelerator="cpu", plugins=["my.py"])


def test_the_command_line(no_command_line, capsys):
    assert main(["fit", "net.py"]) == 2
    assert (
        capsys.readouterr().err
        == "geartrain: the command line is not installed. Fix: pip install geartrain-cli\n"
    )


def test_the_command_line_of_a_script(no_command_line):
    with pytest.raises(
        ImportError, match=r"^geartrain.cli is not installed. Fix: pip install geartrain-cli$"
    ):
        _ = gt.cli


@pytest.mark.parametrize("name", [name for kind, name in KNOWN if kind == "command"])
def test_a_command(alone, capsys, name):
    assert main([name]) == 2
    said = capsys.readouterr().err
    assert (
        said == f"geartrain {name}: geartrain {name} is not installed.\n"
        f"Fix: pip install {KNOWN['command', name]}\n"
    )


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, name in KNOWN if kind != "command"],
    ids=lambda value: value,
)
def test_a_plugin(alone, kind, name):
    with pytest.raises(
        gt.UsageError,
        match=rf"^{kind} '{name}' is not installed. Fix: pip install {KNOWN[kind, name]}$",
    ):
        registry.Registry().find(kind, name)


@pytest.mark.parametrize(
    "module", ["geartrain.loggers", "geartrain.strategies", "geartrain.accelerators"]
)
def test_a_class_of_a_plugin(alone, module):
    homes = importlib.import_module(module)._HOMES
    assert homes
    for name in homes:
        with pytest.raises(
            ImportError,
            match=rf"^{re.escape(module)}.{name} is not installed. Fix: pip install geartrain-\w+$",
        ):
            getattr(importlib.import_module(module), name)


def test_help_names_the_distributions_of_missing_commands(alone, capsys):
    assert main(["--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for (kind, name), home in KNOWN.items():
        if kind == "command":
            assert re.search(rf" {name} .{{0,150}}?\(not installed: pip install {home}\)", said)


def test_a_time_limit(alone):
    message = "^max_time=8 needs geartrain-callbacks. Fix: pip install geartrain-callbacks$"
    with pytest.raises(gt.UsageError, match=message):
        gt.Trainer(accelerator="cpu", max_time=8)


@pytest.mark.parametrize("given", [16, "bf16-true", "64"])
def test_a_precision(alone, given):
    message = r"^precision '[a-z0-9-]+' is not installed. Fix: pip install geartrain-callbacks$"
    with pytest.raises(gt.UsageError, match=message):
        gt.Trainer(accelerator="cpu", precision=given)


def test_an_attribute_of_lightnings_trainer(alone):
    one = gt.Trainer(accelerator="cpu")
    with pytest.raises(AttributeError, match="pip install geartrain-callbacks"):
        _ = one.lightning_module


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"gradient_clip_val": 0.5}, "gradient_clip_val=0.5"),
        ({"val_check_interval": "00:00:30:00"}, "a time as val_check_interval"),
        ({"callbacks": [object()]}, "callbacks="),
    ],
)
def test_an_option_of_the_callbacks(alone, options, wanted):
    message = f"^{wanted} is not installed. Fix: pip install geartrain-callbacks$"
    with pytest.raises(gt.UsageError, match=message):
        gt.Trainer(accelerator="cpu", **options)


def test_hyperparameters_of_any_kind(alone):
    class Saves(Net):
        def __init__(self, lr=0.1):
            super().__init__()
            self.save_hyperparameters()

    message = "^self.save_hyperparameters is not installed. Fix: pip install geartrain-callbacks$"
    with pytest.raises(gt.UsageError, match=message):
        Saves()


def test_a_loss_with_a_weight(alone):
    class Weighs(Net):
        def training_step(self, batch, batch_idx):
            return {"loss": super().training_step(batch, batch_idx), "weight": 4}

    message = r"^'weight' of training_step is not .* pip install geartrain-callbacks$"
    with pytest.raises(gt.UsageError, match=message):
        gt.Trainer(accelerator="cpu", enable_progress_bar=False).fit(Weighs(), loader())


@pytest.mark.end_to_end
def test_core_trains_without_the_tools(alone, tmp_path):
    one = gt.Trainer(
        accelerator="cpu", max_epochs=1, output=tmp_path / "run", enable_progress_bar=False
    )
    one.fit(Net(), loader())
    assert one.global_step == 6
    assert (tmp_path / "run" / "last.ckpt").exists()


@pytest.mark.parametrize(
    ("methods", "options", "reason", "distribution"),
    [
        (
            {"automatic_optimization": False},
            {},
            "Mine.automatic_optimization = False",
            "geartrain-callbacks",
        ),
        (
            {
                "backward": lambda self, loss: loss.backward(),
                "configure_gradient_clipping": lambda self, optimizer, limit, algorithm: None,
            },
            {},
            "Mine.backward, Mine.configure_gradient_clipping",
            "geartrain-callbacks",
        ),
        ({}, {"sync_batchnorm": True}, "sync_batchnorm=True", "geartrain-parallel"),
        ({}, {"overfit_batches": 1}, "overfit_batches=1", "geartrain-callbacks"),
        ({}, {"deterministic": "warn"}, "deterministic='warn'", "geartrain-callbacks"),
        ({}, {"detect_anomaly": True}, "detect_anomaly=True", "geartrain-callbacks"),
        (
            {},
            {"reload_dataloaders_every_n_epochs": 2},
            "reload_dataloaders_every_n_epochs=2",
            "geartrain-callbacks",
        ),
        (
            {"training_epoch_end": lambda self, outputs: None},
            {},
            "Mine.training_epoch_end",
            "geartrain-callbacks",
        ),
    ],
)
def test_a_module_or_an_option_that_needs_a_plugin(alone, methods, options, reason, distribution):
    module = type("Mine", (Net,), methods)
    trainer = gt.Trainer(accelerator="cpu", **options)
    message = f"{reason} needs {distribution}. Fix: pip install {distribution}"
    for start in (lambda: trainer.fit(module(), loader()), lambda: trainer.check(module)):
        with pytest.raises(gt.UsageError, match=f"^{re.escape(message)}$"):
            start()
