"""Mistakes of users in scripts: each gets one message with a fix, or is accepted."""

import re
import subprocess
import sys
import traceback
import warnings

import pytest
import torch
from small_models import EvalNet, Net, loader, trainer
from torch import nn
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain.callbacks import EarlyStopping


class Data(gt.DataModule):
    def train_dataloader(self):
        return loader()


def net(base=Net, **members):
    """Return an object of a subclass ``Mine`` with these members."""
    return type("Mine", (base,), members)()


def fit(module=None, data=None, **options):
    trainer().fit(
        Net() if module is None else module, loader() if data is None else data, **options
    )


def optimizes(make):
    return lambda: fit(net(configure_optimizers=make))


def returns(make):
    return lambda: fit(net(training_step=lambda self, batch, batch_idx: make(self.loss(batch))))


def logs(*arguments, **options):
    def step(self, batch, batch_idx):
        self.log(*arguments, **options)
        return self.loss(batch)

    return lambda: fit(net(training_step=step))


class NoLayers(Net):
    """Its layers are in a list, which torch does not search."""

    def __init__(self):
        super().__init__()
        self.layers = None
        self.hidden = [nn.Linear(3, 1)]


class SetsDevice(Net):
    def __init__(self):
        super().__init__()
        self.device = torch.device("cpu")


#: What a user writes -> the words of the answer.
REFUSED = {
    # the arguments of Trainer
    "epochs=": (lambda: gt.Trainer(epochs=3), "no argument 'epochs'. Did you mean 'max_epochs'?"),
    "max_epoch=": (lambda: gt.Trainer(max_epoch=3), "Did you mean 'max_epochs'?"),
    "max_epochs='three'": (lambda: gt.Trainer(max_epochs="three"), "must be a whole number"),
    "gpus=": (lambda: gt.Trainer(gpus=2), "Write: devices=N with accelerator='gpu'"),
    "gpus=2, accelerator='dp'": (
        lambda: gt.Trainer(gpus=2, accelerator="dp"),
        "devices=N with accelerator='gpu'.*strategy='dp'",
    ),
    "accelerator='ddp'": (
        lambda: gt.Trainer(accelerator="ddp"),
        "Fix: strategy='ddp'|Write: strategy='ddp'",
    ),
    "accelerator='gpus'": (lambda: gt.Trainer(accelerator="gpus"), "Did you mean 'gpu'"),
    "strategy='dpp'": (lambda: gt.Trainer(strategy="dpp"), "Did you mean .*'ddp'"),
    "precision='fp16'": (lambda: gt.Trainer(precision="fp16"), "Fix: use one of 16-mixed"),
    "devices=0": (lambda: gt.Trainer(devices=0), "Fix: a number of processes"),
    "devices='gpu'": (lambda: trainer(devices="gpu"), "Fix: a number of processes"),
    "logger=True": (lambda: gt.Trainer(logger=True), "Write: plugins="),
    "callbacks=[EarlyStopping]": (lambda: trainer(callbacks=[EarlyStopping]), "Fix: use an object"),
    "callbacks=['early_stopping']": (
        lambda: trainer(callbacks=["early_stopping"]),
        "Fix: plugins=",
    ),
    "seed='abc'": (lambda: gt.Trainer(seed="abc"), "must be a whole number"),
    # the arguments of fit and the other commands
    "fit(Net, ...)": (lambda: fit(Net), r"Net is a class. Fix: fit\(Net\(...\)"),
    "no data": (lambda: trainer().fit(Net()), "Fix: give one, or define train_dataloader"),
    "a dataset": (lambda: fit(data=loader().dataset), "not a loader. Fix: use a DataLoader"),
    "model and loader exchanged": (lambda: fit(loader(), Net()), "not a loader|not a geartrain"),
    "train_dataloader=": (
        lambda: trainer().fit(Net(), train_dataloader=loader()),
        "Did you mean 'train_dataloaders'?",
    ),
    "datamodule=Data": (
        lambda: trainer().fit(Net(), datamodule=Data),
        r"datamodule=Data is a class. Fix: Data\(\.\.\.\)",
    ),
    "a loader and a data module": (
        lambda: trainer().fit(Net(), loader(), datamodule=Data()),
        "a train loader is given, and Data has train_dataloader. Fix: give one of them",
    ),
    "ckpt_path of no file": (
        lambda: fit(ckpt_path="missing.ckpt"),
        "no checkpoint missing.ckpt. Fix: pass an existing file",
    ),
    "test without test_step": (
        lambda: trainer().test(Net(), loader()),
        "Net has no test_step, which test needs. Fix: define it",
    ),
    "validate() first": (lambda: trainer().validate(), r"Fix: validate\(model, \.\.\.\)"),
    # the module
    "self.device =": (SetsDevice, "self.device is set by the run. Fix: take the assignment out"),
    "no training_step": (
        lambda: fit(net(gt.Module, configure_optimizers=lambda self: None)),
        "has no training_step, which fit needs. Fix: define it",
    ),
    "train_step": (
        lambda: fit(net(train_step=Net.training_step)),
        "Did you mean 'training_step'.*Fix: rename it",
    ),
    "no configure_optimizers": (
        lambda: fit(net(gt.Module, training_step=Net.training_step)),
        "has no configure_optimizers. Fix: return an optimizer",
    ),
    "a signature of configure_optimizers": (
        optimizes(lambda self, lr: None),
        r"Mine.configure_optimizers takes \(lr\).*Fix: def configure_optimizers\(self\)",
    ),
    "SGD, and not SGD(...)": (optimizes(lambda self: torch.optim.SGD), "Fix: return an optimizer"),
    "SGD([])": (
        optimizes(lambda self: torch.optim.SGD([], lr=0.1)),
        "empty parameter list.*Fix: make layers attributes",
    ),
    "layers in a list": (lambda: fit(NoLayers()), "Fix: make layers attributes.*nn.ModuleList"),
    "lr=None": (
        optimizes(lambda self: torch.optim.SGD(self.parameters(), lr=None)),
        "not supported.*Fix: give the optimizer numbers, as lr=0.1",
    ),
    "lr='1e-3'": (
        optimizes(lambda self: torch.optim.SGD(self.parameters(), lr="1e-3")),
        "not supported.*Fix: give the optimizer numbers, as lr=0.1",
    ),
    "a loss as a float": (returns(lambda loss: loss.item()), "Fix: return the loss"),
    "a loss in a tuple": (returns(lambda loss: (loss, 1)), "Fix: return the loss"),
    "a loss under another key": (returns(lambda loss: {"los": loss}), "Fix: return the loss"),
    "a loss of several numbers": (returns(lambda loss: loss.expand(2)), "Fix: return its .mean"),
    "a detached loss": (returns(lambda loss: loss.detach()), "Fix: compute the loss from"),
    "backward() in the step": (
        returns(lambda loss: (loss.backward(), loss)[1]),
        "Fix: return the loss and leave backward",
    ),
    "log of a vector": (logs("x", torch.zeros(2)), "Fix: .mean"),
    "log of a text": (logs("x", "high"), "a metric is a number"),
    "a metric that nobody logs": (
        lambda: trainer(callbacks=[EarlyStopping("val_los")]).fit(EvalNet(), loader(), loader()),
        "Did you mean 'val_loss'?.*Fix: log it",
    ),
    "an empty loader": (lambda: fit(data=DataLoader([])), "Fix: give it samples"),
}


def text_of(error):
    """Return what Python prints of an error, without its traceback."""
    return "".join(traceback.format_exception_only(error))


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_gets_one_message_with_a_fix(name):
    mistake, words = REFUSED[name]
    with pytest.raises((gt.GeartrainError, TypeError, ValueError, RuntimeError)) as caught:
        mistake()
    assert re.search(words, text_of(caught.value), re.DOTALL), text_of(caught.value)


ACCEPTED = {
    "a step without batch_idx": lambda: fit(
        net(training_step=lambda self, batch: self.loss(batch))
    ),
    "a data module in place of a loader": lambda: fit(data=Data()),
    "one callback without a list": lambda: trainer(callbacks=EarlyStopping("val_loss")).fit(
        EvalNet(), loader(), loader()
    ),
    "max_epochs=None": lambda: trainer(max_epochs=None, max_steps=1).fit(Net(), loader()),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_rightly_accepted(name):
    ACCEPTED[name]()


# --- logs and warnings ----------------------------------------------------------------------------


def test_log_outside_a_run_warns_once_at_the_line_and_does_nothing():
    class Logs(Net):
        def training_step(self, batch, batch_idx):
            self.log("loss", 1.0)
            return self.loss(batch)

    module, batch = Logs(), next(iter(loader()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            assert module.training_step(batch, 0).ndim == 0
    [warning] = caught
    assert "self.log does nothing: no Trainer runs this module" in str(warning.message)
    assert warning.filename == __file__


def untrained():
    fit(net(training_step=lambda self, batch, batch_idx: None))


def unused_loader():
    trainer().fit(Net(), loader(), loader())


def nothing_to_step():
    fit(net(configure_optimizers=lambda self: None))


@pytest.mark.parametrize("cause", [untrained, unused_loader, nothing_to_step])
def test_warnings_point_at_the_line_of_the_user(cause):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cause()
    assert {warning.filename for warning in caught} == {__file__}


def test_without_a_line_of_the_user_a_warning_points_at_none():
    """A command's process has no line of the user."""
    code = (
        "import geartrain.errors as e, threading\n"
        "thread = threading.Thread(target=e.warn, args=('no line',))\n"
        "thread.start(); thread.join()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "geartrain:0: UserWarning: no line"


# --- runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_idx", [0, 2])
def test_should_stop_ends_training_after_the_step(batch_idx):
    def step(self, batch, i):
        if i == batch_idx:
            self.trainer.should_stop = True
        return self.loss(batch)

    one = trainer(max_epochs=3)
    one.fit(net(training_step=step), loader())
    assert one.global_step == batch_idx + 1


class Breaks(Net):
    def training_step(self, batch, batch_idx):
        self.log("loss", 1.0)
        if batch_idx == 2:
            raise KeyError("mine")
        return self.loss(batch)


def test_a_run_that_failed_before_its_first_checkpoint_leaves_its_folder_free(tmp_path):
    options = {"output": tmp_path / "run", "log_every_n_steps": 1}
    with pytest.raises(KeyError):
        trainer(**options).fit(Breaks(), loader())
    assert "failed" in (tmp_path / "run" / "summary.json").read_text()
    trainer(**options).fit(Net(), loader())
    assert '"status": "done"' in (tmp_path / "run" / "summary.json").read_text()
    assert not (tmp_path / "run" / "metrics.jsonl").read_text()


def test_a_run_that_saved_a_checkpoint_keeps_its_folder(tmp_path):
    class Late(Net):
        def training_step(self, batch, batch_idx):
            if self.current_epoch:
                raise KeyError("mine")
            return self.loss(batch)

    options = {"output": tmp_path / "run", "max_epochs": 2}
    with pytest.raises(KeyError):
        trainer(**options).fit(Late(), loader())
    with pytest.raises(gt.UsageError, match="already contains a run"):
        trainer(**options).fit(Net(), loader())


# --- errors of a step -----------------------------------------------------------------------------


def shown(error):
    """Return the files of the lines that Python prints, and all that it prints."""
    text = "".join(traceback.format_exception(error))
    return re.findall(r'File "(.*?)", line', text), text


def test_an_error_of_a_step_shows_the_users_lines():
    with pytest.raises(KeyError) as caught:
        trainer().fit(Breaks(), loader())
    files, text = shown(caught.value)
    assert len(files) == 3
    assert files[0] == files[2] == __file__
    assert 'raise KeyError("mine")' in text


def test_an_error_that_geartrain_raises_shows_the_users_lines_and_no_cause():
    def step(self, batch, batch_idx):
        return self.loss(batch).detach()

    with pytest.raises(gt.TrainingError) as caught:
        trainer().fit(net(training_step=step), loader())
    files, text = shown(caught.value)
    assert len([file for file in files if file != __file__]) == 1
    assert text.count("Traceback") == 1
    assert isinstance(caught.value.__context__, RuntimeError)


def test_the_environment_variable_keeps_all_lines(monkeypatch):
    monkeypatch.setenv("GEARTRAIN_TRACEBACK", "1")
    with pytest.raises(KeyError) as caught:
        trainer().fit(Breaks(), loader())
    assert len(shown(caught.value)[0]) > 10
