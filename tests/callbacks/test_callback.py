"""Trainer(callbacks=[...]): callbacks written as for PyTorch Lightning."""

import inspect
import itertools
import pickle
import re
from pathlib import Path

import pytest
from small_models import EvalNet, Logging, Net, Own, fit, loader, trainer

import geartrain as gt
from geartrain import UsageError
from geartrain.callbacks import Callback, EarlyStopping, LambdaCallback
from geartrain.hooks.events import METHODS
from geartrain_callbacks.callback import CALLED, NOT_CALLED, Adapter

OF_CHECKPOINTS = ["on_save_checkpoint", "on_load_checkpoint"]
OTHERS = ["setup", "teardown", "on_exception", *OF_CHECKPOINTS]
EVENTS = [name for name in CALLED if name not in OTHERS]


def noting(notes, label="", methods=CALLED):
    """Return a callback that records each call of ``methods``."""

    def method(name):
        def call(self, trainer, pl_module, *arguments):
            notes.append(f"{label}{name}")

        return call

    return type("Noting", (Callback,), {name: method(name) for name in methods})()


def test_each_method_is_called_just_before_the_modules_own_hook():
    notes, own = [], []

    class Both(Own):
        def __init__(self):
            super().__init__(notes.append)

    fit(Own(own.append), val=loader(8), max_epochs=2, num_sanity_val_steps=1)
    callback = noting(notes, "callback ", EVENTS)
    fit(Both(), val=loader(8), max_epochs=2, num_sanity_val_steps=1, callbacks=[callback])
    assert [note for note in notes if not note.startswith("callback ")] == own
    called = [note.removeprefix("callback ") for note in notes if note.startswith("callback ")]
    assert called == [name for name in own if name in EVENTS]
    for before, after in itertools.pairwise(notes):
        if before.startswith("callback "):
            assert after == before.removeprefix("callback ")


@pytest.mark.parametrize(
    ("command", "stage"), [("validate", "validation"), ("test", "test"), ("predict", "predict")]
)
def test_evaluation(command, stage):
    notes = []
    getattr(trainer(callbacks=[noting(notes)]), command)(EvalNet(), loader(4))
    events = [
        f"on_{stage}_start",
        f"on_{stage}_epoch_start",
        f"on_{stage}_batch_start",
        f"on_{stage}_batch_end",
    ]
    assert notes == ["setup", *events, f"on_{stage}_epoch_end", f"on_{stage}_end", "teardown"]


def test_every_method_is_called(tmp_path):
    notes = []
    one = trainer(callbacks=[noting(notes)], num_sanity_val_steps=1)
    one.fit(EvalNet(), loader(), loader())
    one.save_checkpoint(tmp_path / "a.ckpt")
    more = trainer(callbacks=[noting(notes)], max_epochs=2)
    more.fit(EvalNet(), loader(), loader(), ckpt_path=tmp_path / "a.ckpt")
    one.test(EvalNet(), loader())
    one.predict(EvalNet(), loader())
    with pytest.raises(ZeroDivisionError):
        one.fit(Logging(lambda self, batch, i: 1 / 0), loader())
    assert set(notes) == set(CALLED)


def test_arguments_are_lightnings():
    """A single callback needs no list."""
    seen = {}

    class Looks(Callback):
        def setup(self, trainer, pl_module, stage):
            seen["setup"] = (trainer, pl_module, stage, trainer.global_rank)

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen["train"] = (trainer, pl_module, outputs, batch, batch_idx)

        def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx):
            seen["start"] = (len(batch), batch_idx, dataloader_idx)

        def on_validation_batch_end(self, *arguments):
            seen["end"] = (len(arguments), *arguments[-2:])

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            seen["optimizer"] = optimizer

    module = EvalNet()
    one = fit(module, val=[loader(8), loader(4)], callbacks=Looks())
    assert seen["setup"] == (one, module, "fit", 0)
    assert seen["train"][:2] == (one, module)
    assert seen["train"][2].ndim == 0
    assert seen["train"][4] == 5
    assert seen["start"] == (2, 0, 1)
    assert seen["end"] == (6, 0, 1)
    assert seen["optimizer"] is one.run.optimizers[0]


def test_setup_comes_between_prepare_data_and_setup_as_in_lightning():
    notes = []

    class Data(gt.DataModule):
        def prepare_data(self):
            notes.append("data.prepare_data")

        def setup(self, stage):
            notes.append("data.setup")

        def train_dataloader(self):
            return loader()

    class Prepares(Net):
        def prepare_data(self):
            notes.append("prepare_data")

        def setup(self, stage):
            notes.append("setup")

    class Looks(Callback):
        def setup(self, trainer, pl_module, stage):
            notes.append("callback.setup")
            assert pl_module.trainer is trainer
            self.data = trainer.datamodule

    data, looks = Data(), Looks()
    trainer(callbacks=[looks]).fit(Prepares(), data)
    assert notes == ["data.prepare_data", "prepare_data", "callback.setup", "data.setup", "setup"]
    assert looks.data is data


def test_callbacks_without_setup_are_not_torn_down():
    notes = []

    class Fails(Net):
        def prepare_data(self):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(Fails(), callbacks=[noting(notes)])
    assert notes == ["on_exception"]


def test_lambda_callback_calls_each_function_as_the_method_of_its_name():
    calls = []
    callback = LambdaCallback(
        setup=lambda trainer, module, stage: calls.append(stage),
        on_train_batch_end=lambda trainer, module, outputs, batch, i: calls.append(i),
        on_validation_batch_end=lambda *arguments: calls.append(len(arguments)),
    )
    fit(EvalNet(), val=loader(4), callbacks=[callback])
    assert calls == ["fit", *range(6), 6]


def test_callbacks_and_plugins_may_stand_in_either_list():
    notes = []
    module = Logging(validate=lambda self, batch, i: self.log("val_loss", 5.0))
    callbacks = [EarlyStopping("val_loss", patience=1), noting([])]
    plugins = [noting(notes, methods=["on_train_epoch_end"])]
    one = fit(module, val=loader(), max_epochs=9, callbacks=callbacks, plugins=plugins)
    assert one.current_epoch == len(notes) == 2
    labels = [choice.label for choice in one.plan.plugins]
    assert sorted(labels) == ["Noting", "Noting", "geartrain-callbacks[early_stopping]"]


def test_it_may_log_and_stop():
    class Logs(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            pl_module.log("from_callback", float(trainer.current_epoch))
            trainer.should_stop = trainer.current_epoch == 1

    one = fit(callbacks=[Logs()], max_epochs=9)
    assert one.callback_metrics["from_callback"] == 1
    assert one.current_epoch == 2


def test_callbacks_receive_the_exception():
    seen = []

    class Told(Callback):
        def on_exception(self, trainer, pl_module, exception):
            seen.append(exception)

        def teardown(self, trainer, pl_module, stage):
            seen.append(stage)

    with pytest.raises(ZeroDivisionError) as raised:
        fit(Logging(lambda self, batch, i: 1 / 0), callbacks=[Told()])
    assert seen == [raised.value, "fit"]


def test_state_is_the_callbacks():
    class Keeps(Callback):
        n = 0

        def on_train_epoch_end(self, trainer, pl_module):
            self.n += 1

        def state_dict(self):
            return {"n": self.n}

        def load_state_dict(self, state):
            self.n = state["n"]

    callback = Keeps()
    fit(callbacks=[callback])
    adapter = Adapter(callback)
    assert adapter.state_dict() == {"n": 1}
    adapter.load_state_dict({"n": 7})
    assert callback.n == 7
    assert not hasattr(Adapter(noting([])), "state_dict")


class Module(Callback):
    """A callback that another process can import."""

    def on_fit_start(self, trainer, pl_module): ...


def test_a_callback_can_be_sent_to_another_process():
    assert isinstance(pickle.loads(pickle.dumps(Adapter(Module()))).callback, Callback)


def with_method(name, base=Callback):
    """Return an object of a class ``Mine`` with this method."""
    return type("Mine", (base,), {name: lambda self, trainer, pl_module: None})()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        *(
            (with_method(name), rf"Mine.{name} would never be called. Use in")
            for name in NOT_CALLED
        ),
        (
            with_method("on_train_epoch_ends"),
            r"Mine.*_ends would never be called. Did you mean 'on_train_epoch_end'\?",
        ),
        (Callback(), "overrides no method"),
        (object(), "no callback"),
        ("early_stopping", "no callback"),
    ],
)
def test_callbacks_that_would_never_be_called_are_refused(wrong, message):
    with pytest.raises(UsageError, match=message):
        trainer(callbacks=[wrong])


def test_the_base_has_each_hook_of_the_module_with_its_arguments():
    assert set(EVENTS) == METHODS
    for name in EVENTS + OF_CHECKPOINTS:
        own = list(inspect.signature(getattr(gt.Module, name)).parameters)
        found = list(inspect.signature(getattr(Callback, name)).parameters)
        assert found == ["self", "trainer", "pl_module", *own[1:]]


def test_the_docs_list_all_methods_called_and_not_called():
    page = (Path(__file__).parents[2] / "docs" / "callbacks.md").read_text(encoding="utf-8")
    for heading, methods in (("| called | when |", CALLED), ("| not called | ", NOT_CALLED)):
        rows = page.partition(heading)[2].partition("\n\n")[0].splitlines()[2:]
        names = "".join(row.split("|")[1] for row in rows)
        assert set(re.findall(r"`(\w+)`", names)) == set(methods)


# --- self.log -------------------------------------------------------------------------------------


class Logs(Callback):
    """Logs in each hook that a user logs in."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.log("seen", batch_idx, on_step=False, on_epoch=True, reduce_fx="max")

    def on_validation_epoch_end(self, trainer, pl_module):
        self.log_dict({"a": 1.0, "b": 2.0}, prog_bar=True)

    def on_train_epoch_end(self, trainer, pl_module):
        self.log("end", trainer.current_epoch)


def test_log_in_a_callback_is_log_of_the_module():
    one = fit(EvalNet(), val=loader(8), callbacks=[Logs()])
    metrics = {name: value.item() for name, value in one.callback_metrics.items()}
    assert metrics.items() >= {"seen": 5, "a": 1, "b": 2, "end": 0}.items()
    assert one.run.logs.prog_bar == {"a": 1, "b": 2}


def test_log_outside_a_run():
    callback = Logs()
    fit(EvalNet(), val=loader(8), callbacks=[callback])
    for log in (lambda: callback.log("late", 1), lambda: callback.log_dict({"late": 1})):
        with pytest.raises(RuntimeError, match=r"Logs: self\.log\('late'\) works only in hooks"):
            log()
    assert vars(pickle.loads(pickle.dumps(callback))) == {}


def test_a_callback_may_have_a_log_of_its_own():
    class Own(Callback):
        def __init__(self):
            self.log = []

        def on_train_start(self, trainer, pl_module):
            self.log.append("start")

    callback = Own()
    fit(callbacks=[callback])
    assert callback.log == ["start"]


# --- third-party callbacks that extend Lightning's class ------------------------------------------


class Lightnings:
    """Lightning's ``Callback``: its methods do nothing."""

    state_key = property(lambda self: 1 / 0)

    def on_train_start(self, trainer, pl_module): ...

    def on_train_end(self, trainer, pl_module): ...

    def on_save_checkpoint(self, trainer, pl_module, checkpoint): ...

    def state_dict(self):
        return {}

    def load_state_dict(self, state): ...


Lightnings.__name__, Lightnings.__module__ = "Callback", "lightning.pytorch.callbacks.callback"


class ThirdParty(Lightnings):
    def __init__(self):
        self.notes = []

    def on_train_start(self, trainer, pl_module):
        self.notes.append((trainer.training, pl_module.current_epoch))

    def on_train_epoch_end(self, trainer, pl_module):
        self.log("mine", 3.0)


def test_a_third_party_callback_of_lightnings_class():
    """Only its own methods are called; it gets ``log`` as from Lightning's trainer."""
    callback = ThirdParty()
    one = fit(callbacks=[callback])
    assert callback.notes == [(True, 0)]
    assert one.callback_metrics["mine"] == 3
    assert one.callbacks == [callback]
    assert [info.name for info in one.plan.plugins] == ["ThirdParty"]
    assert "log" not in vars(callback)


def test_a_third_party_callback_that_cannot_work():
    class Saves(ThirdParty):
        def on_epoch_end(self, trainer, pl_module): ...

    with pytest.raises(UsageError, match=r"Saves\.on_epoch_end would never be called"):
        trainer(callbacks=[Saves()])
    own = type("EarlyStopping", (ThirdParty,), {"__module__": "lightning.pytorch.callbacks"})
    with pytest.raises(UsageError, match=r"own\. Fix: use geartrain\.callbacks\.EarlyStopping"):
        trainer(callbacks=[own()])
