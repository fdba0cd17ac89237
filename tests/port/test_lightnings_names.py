"""Errors for Lightning's names name the counterpart; other names fail as usual."""

import pickle
import traceback

import pytest
import torch
from small_models import Net, loader, trainer

import geartrain as gt
from geartrain import UsageError

NAMES = {
    "gt.Callback": "Write: geartrain.callbacks.Callback",
    "gt.LightningCLI": "Write: gt.cli(",
    "gt.callbacks.LearningRateFinder": "Write: geartrain tune lr",
    "gt.callbacks.RichModelSummary": "Write: geartrain.callbacks.ModelSummary",
    "gt.loggers.TensorBoardLogger": "Write: geartrain.loggers.TensorBoard",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_lightning_names_its_counterpart(name):
    with pytest.raises((AttributeError, ImportError)) as refused:
        eval(name)
    assert repr(name.rpartition(".")[2]) in str(refused.value)
    assert NAMES[name] in str(refused.value)


@pytest.mark.parametrize(
    "name", ["gt.callbacks.LearningRateFinder", "gt.loggers.TensorBoardLogger"]
)
def test_importing_a_name_of_lightning_names_its_counterpart(name):
    module, _, attribute = name.replace("gt", "geartrain").rpartition(".")
    with pytest.raises(ImportError) as refused:
        exec(f"from {module} import {attribute}")
    assert NAMES[name] in str(refused.value)


@pytest.mark.parametrize("owner", [gt, gt.callbacks, gt.loggers, gt.strategies])
def test_unknown_names_are_not_attributes(owner):
    assert not hasattr(owner, "invented")
    assert not hasattr(owner, "__wrapped__")


def test_the_tuner_needs_no_separate_import():
    assert gt.tuning.Tuner(trainer())


def test_a_class_of_two_entry_points_is_listed_once():
    assert len(dir(gt.strategies)) == len(set(dir(gt.strategies)))


# --- a trainer, a session -------------------------------------------------------------------------


def test_a_trainers_attribute_names_its_counterpart():
    one = trainer()
    with pytest.raises(
        AttributeError,
        match=r"'Trainer' object has no attribute 'profiler'\. Write: the plugin 'profile', which ",
    ):
        _ = one.profiler
    with pytest.raises(AttributeError, match=r"'Trainer' object has no attribute 'invented'$"):
        _ = one.invented
    assert pickle.loads(pickle.dumps(one)).max_epochs == one.max_epochs


def test_the_error_inside_a_property_is_kept():
    class Mine(gt.Trainer):
        @property
        def odd(self):
            return torch.nothing_of_this_name

    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = Mine(accelerator="cpu", max_epochs=1).odd


def test_a_sessions_attribute_names_its_counterpart():
    session = gt.Fabric(accelerator="cpu")
    with pytest.raises(
        AttributeError,
        match=r"'Session' object has no attribute 'accelerator'\. Write: fabric\.plan",
    ):
        _ = session.accelerator
    assert not hasattr(session, "invented")


def test_the_counterparts_of_a_session_can_be_evaluated():
    from geartrain_port.names import OF_FABRIC

    texts = [text for text in OF_FABRIC.values() if text.startswith("fabric.") and "(" not in text]
    assert len(texts) == 2
    for text in texts:
        assert eval(text, {"fabric": gt.Fabric(accelerator="cpu")})
    assert not [name for name in OF_FABRIC if hasattr(gt.Fabric, name)]


# --- fit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "words"),
    [("weights_only", "Write: nothing"), ("dataloaders", "Write: train_dataloaders=")],
)
def test_an_argument_of_lightnings_fit_names_its_counterpart(argument, words):
    with pytest.raises(UsageError, match=rf"Trainer\.fit has no argument '{argument}'") as refused:
        trainer().fit(Net(), loader(), **{argument: None})
    assert words in str(refused.value)


def test_a_class_is_no_model():
    with pytest.raises(UsageError, match=r"Net is a class\. Fix: fit\(Net\(\.\.\.\), \.\.\.\)"):
        trainer().fit(Net, loader())


def test_a_callback_by_name_is_a_plugin():
    with pytest.raises(
        UsageError,
        match=r"callbacks='early_stopping': it is no callback\. Fix: plugins=\['early_stopping'\]",
    ):
        trainer(callbacks="early_stopping")


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("ddp_notebook", "strategy='ddp_spawn' with strategy_options={'start_method': 'fork'}"),
        (
            "ddp_find_unused_parameters_true",
            "strategy='ddp' with strategy_options={'find_unused_parameters': True}",
        ),
        ("ddp_find_unused_parameters_false", "strategy='ddp'"),
    ],
)
def test_lightnings_name_of_a_strategy_names_its_counterpart(name, fix):
    with pytest.raises(UsageError) as refused:
        trainer(strategy=name)
    assert str(refused.value) == f"there is no strategy '{name}'. Fix: {fix}"


def test_a_modules_attribute_names_its_counterpart_during_a_run():
    class Logs(Net):
        def training_step(self, batch, batch_idx):
            self.to_onnx("net.onnx")

    class Odd(Net):
        def training_step(self, batch, batch_idx):
            self.invented()

    with pytest.raises(AttributeError) as failed:
        trainer().fit(Logs(), loader())
    assert "geartrain.Module has no 'to_onnx'. Write: torch.onnx.export" in "".join(
        traceback.format_exception(failed.value)
    )
    with pytest.raises(AttributeError) as failed:
        trainer().fit(Odd(), loader())
    assert not hasattr(failed.value, "__notes__")
