"""docs/from-lightning.md has every name of Lightning, and describes each correctly.

``lightning_names.json`` was made once from the sources of the versions that it names; it has only
names.
"""

import inspect
import json
import re
from pathlib import Path

import pytest
import torch

import geartrain as gt
from geartrain import accelerators, callbacks, loggers, strategies
from geartrain.loop.step_forwarder import check_data, check_module
from geartrain_callbacks.callback import Adapter, Callback
from geartrain_callbacks.trainer_view import TrainerView
from geartrain_port import names

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "from-lightning.md").read_text(encoding="utf-8")
LIGHTNING = json.loads((HERE / "lightning_names.json").read_text(encoding="utf-8"))
KINDS = {"same", "renamed", "plugin", "left out", "refused"}


def section(title):
    """Return (names, kind, text) for each row of the table under a heading."""
    text = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)[1]
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in text.splitlines()
        if line.startswith("|")
    ][2:]
    return [(re.findall(r"`([^`]+)`", row[-3]), row[-2], row[-1], row[0]) for row in rows]


def cases(title, group):
    """Return each name under a heading with its kind, as pytest's parameters."""
    return [
        pytest.param(name, kind, id=name) for found, kind, _, _ in section(title) for name in found
    ]


TABLES = {
    "Trainer's arguments": "trainer",
    "Trainer's properties": "trainer_members",
    "LightningModule": "module",
    "LightningDataModule": "datamodule",
    "Callback's hooks": "callback",
    "Callbacks": "callbacks",
    "Loggers": "loggers",
    "Strategies": "strategies",
}


@pytest.mark.parametrize("title", TABLES)
def test_every_name_is_in_the_table_once(title):
    found = [name for row in section(title) for name in row[0]]
    assert len(found) == len(set(found))
    assert set(found) >= set(LIGHTNING[TABLES[title]])
    assert {row[1] for row in section(title)} <= KINDS


# --- the trainer ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), cases("Trainer's arguments", "trainer"))
def test_argument_of_the_trainer(name, kind):
    if kind == "same":
        assert name in inspect.signature(gt.Trainer).parameters
        return
    with pytest.raises(
        gt.UsageError, match=f"Trainer has no argument '{name}'. Write: "
    ) as refused:
        gt.Trainer(**{name: object()})
    assert str(refused.value).partition("Write: ")[2].startswith("nothing") == (kind == "left out")


@pytest.mark.parametrize("method", ["fit", "validate", "test", "predict"])
def test_arguments_of_methods(method):
    rows = [row for row in section("Trainer's methods") if row[3] == f"`trainer.{method}`"]
    assert [name for row in rows for name in row[0]] != []
    assert {name for row in rows for name in row[0]} == set(LIGHTNING[method])
    parameters = inspect.signature(getattr(gt.Trainer, method)).parameters
    for found, kind, _, _ in rows:
        for name in found:
            assert (name in parameters) == (kind == "same")


@pytest.mark.parametrize(("name", "kind"), cases("Trainer's properties", "trainer_members"))
def test_property_of_the_trainer(name, kind):
    homes = (gt.Trainer, TrainerView)  # a Trainer has those of TrainerView too
    assert any(hasattr(home, name) for home in homes) == (kind == "same")


class Net(gt.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Watch(Callback):
    """Evaluate the replacements on the page while a trainer runs."""

    def __init__(self, texts):
        self.texts = texts

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        for text in self.texts:
            eval(text, {"self": pl_module, "torch": torch})


class Reads(Callback):
    """Reads every property on the page."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        read_all(trainer)


def read_all(trainer):
    for found, kind, _, _ in section("Trainer's properties"):
        for name in found if kind == "same" else ():
            getattr(trainer, name)


def test_properties_can_be_read_before_during_and_after_a_run():
    trainer = gt.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        enable_progress_bar=False,
        callbacks=[Reads()],
    )
    # Only a run knows the number of its steps.
    with pytest.raises(RuntimeError, match="has not run anything"):
        read_all(trainer)
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(8, 4)))
    read_all(trainer)


STAGES = ("training", "validating", "testing", "predicting", "evaluating", "sanity_checking")


def test_stage_flags_are_true_in_lightnings_stages():
    """In a validation inside fit, Lightning's trainer.validating is True."""
    seen = {}

    class Looks(Net):
        def _look(self, *arguments):
            stage = self.trainer.run.stage
            seen[self.trainer.run.command, stage] = {
                name for name in STAGES if getattr(self.trainer, name)
            }
            return super().training_step(*arguments) if stage == "train" else None

        training_step = validation_step = test_step = predict_step = _look

    trainer = gt.Trainer(accelerator="cpu", enable_progress_bar=False, max_epochs=1)
    data, net = [torch.ones(2, 4)], Looks()
    trainer.fit(net, data, data)
    for command in ("validate", "test", "predict"):
        getattr(trainer, command)(net, data)
    assert seen == {
        ("fit", "sanity_check"): {"sanity_checking", "evaluating"},
        ("fit", "train"): {"training"},
        ("fit", "validate"): {"validating", "evaluating"},
        ("validate", "validate"): {"validating", "evaluating"},
        ("test", "test"): {"testing", "evaluating"},
        ("predict", "predict"): {"predicting"},
    }


# --- module, data, callbacks ----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), cases("LightningModule", "module"))
def test_name_of_the_module(name, kind):
    if kind == "same":
        assert hasattr(gt.Module, name) or re.search(rf"``{name}[`(]", inspect.getdoc(gt.Module))
    elif kind == "refused":
        with pytest.raises(gt.UsageError, match=f"{name} would never be called. Use instead: "):
            check_module(type("Mine", (Net,), {name: lambda self, *arguments: None}), "fit")
    else:
        with pytest.raises(AttributeError, match=name):
            getattr(Net(), name)


def test_replacements_of_module_names_can_be_evaluated():
    texts = [
        text[1:-1]
        for _, kind, text, _ in section("LightningModule")
        if kind == "renamed" and re.fullmatch(r"`[^`]*`", text)
    ]
    texts = [
        t
        for text in texts
        if text.startswith(("self.", "sum(", "next(")) and "..." not in text
        for t in text.split("; ")
    ]
    assert len(texts) > 5
    trainer = gt.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        enable_progress_bar=False,
        callbacks=[Watch(texts)],
    )
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(8, 4)))


@pytest.mark.parametrize(("name", "kind"), cases("LightningDataModule", "datamodule"))
def test_name_of_the_data_module(name, kind):
    if kind == "same":
        documented = re.search(rf"``{name}[`(]", inspect.getdoc(gt.DataModule))
        assert hasattr(gt.DataModule, name) or documented
    elif kind == "refused":
        with pytest.raises(gt.UsageError, match=f"{name} would never be called. Use instead: "):
            check_data(type("Mine", (gt.DataModule,), {name: lambda self, *arguments: None})())
    else:
        with pytest.raises(AttributeError, match=name):
            getattr(gt.DataModule(), name)


def test_a_data_modules_method_that_is_never_called_is_refused_before_the_run():
    class Data(gt.DataModule):
        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            return batch

    trainer = gt.Trainer(accelerator="cpu", devices=1, max_epochs=1, enable_progress_bar=False)
    with pytest.raises(
        gt.UsageError,
        match=r"Data\.transfer_batch_to_device would never be called\. Use instead: the same "
        r"method of the module",
    ):
        trainer.fit(Net(), datamodule=Data())


@pytest.mark.parametrize(("name", "kind"), cases("Callback's hooks", "callback"))
def test_hook_of_a_callback(name, kind):
    members = {
        "on_fit_start": lambda self, trainer, pl_module: None,
        name: lambda self, *arguments: None,
    }
    if kind == "refused":
        with pytest.raises(gt.UsageError, match=f"{name} would never be called. Use instead: "):
            Adapter(type("Mine", (Callback,), members)())
    elif kind == "same":
        states = {"state_dict": lambda self: {}, "load_state_dict": lambda self, state: None}
        adapter = Adapter(type("Mine", (Callback,), {**states, **members})())
        assert name in adapter._methods or hasattr(adapter, name)


# --- classes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("title", ["Callbacks", "Loggers", "Strategies"])
def test_the_page_names_the_modules_of_classes(title):
    homes = {"Callbacks": callbacks, "Loggers": loggers, "Strategies": strategies}
    for found, kind, text, _ in section(title):
        for name in found:
            target = names.target(f"{title.lower()}.{name}")
            assert (target is None) == (kind == "left out"), name
            if target is None:
                continue
            assert f"`{target[0]}.{target[1]}`" in text
            assert (target[1] == name) == (kind == "same") or kind == "plugin"
            if target[0] == homes[title].__name__ and "Horovod" not in name:
                assert inspect.isclass(getattr(homes[title], target[1]))


def test_find_usable_cuda_devices_has_the_same_import_path():
    assert callable(accelerators.find_usable_cuda_devices)
