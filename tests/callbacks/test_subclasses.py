"""Subclasses of geartrain's callbacks: Lightning's methods run beside the callback's hookimpls."""

import pickle

import pytest
import torch
from regression import Net, samples
from threads import on_threads
from torch.utils.data import DataLoader

import geartrain_callbacks
from geartrain import UsageError, hookimpl
from geartrain.callbacks import (
    EMA,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    NaNGuard,
    Norms,
    PartialWeights,
    ProgressBar,
    RichProgressBar,
    StochasticWeightAveraging,
    Throughput,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from geartrain_callbacks.callback import CALLED, PluginCallback

OPTIONS = {
    EMA: {"decay": 0.9},
    EMAWeightAveraging: {},
    RichProgressBar: {},
    TQDMProgressBar: {},
    ThroughputMonitor: {"batch_size_fn": len},
    WeightAveraging: {},
    EarlyStopping: {"monitor": "val_loss"},
    GradientAccumulationScheduler: {"scheduling": {0: 1}},
    LearningRateMonitor: {},
    ModelCheckpoint: {},
    ModelSummary: {},
    NaNGuard: {},
    Norms: {},
    PartialWeights: {},
    ProgressBar: {},
    StochasticWeightAveraging: {"swa_lrs": 0.1},
    Throughput: {},
    Timer: {"duration": 1000},
}


def noting(cls, notes):
    """Return a subclass whose methods record (rank, class, method), then call ``super()``."""

    def method(name):
        def call(self, trainer, pl_module, *arguments):
            notes.append((trainer.global_rank, cls.__name__, name))
            getattr(super(subclass, self), name)(trainer, pl_module, *arguments)

        return call

    subclass = type("Noting", (cls,), {name: method(name) for name in CALLED})
    return subclass


def fit(*callbacks, ranks=2, ckpt_path=None, **options):
    trainer, strategy = on_threads(
        ranks, callbacks=callbacks, **{"max_epochs": 2, "num_sanity_val_steps": 1, **options}
    )
    loaders = DataLoader(samples(8), batch_size=2), DataLoader(samples(4), batch_size=2)
    trainer.fit(Net(), *loaders, ckpt_path=ckpt_path)
    return trainer, strategy


def test_every_callback_with_hookimpls_is_in_the_table():
    public = [getattr(geartrain_callbacks, name) for name in geartrain_callbacks.__all__]
    assert {cls for cls in public if isinstance(cls, type) and issubclass(cls, PluginCallback)} == {
        *OPTIONS
    }


@pytest.mark.parametrize("cls", OPTIONS)
def test_each_method_runs_once_an_event_in_the_callbacks_order(cls, tmp_path):
    notes = []
    subclass = noting(cls, notes)(**OPTIONS[cls])
    callbacks = [noting(Callback, notes)(), subclass, noting(Callback, notes)()]
    for epochs, ckpt_path in (1, None), (2, "last"):
        notes.clear()
        output = tmp_path / "run"
        _, strategy = fit(*callbacks, output=output, max_epochs=epochs, ckpt_path=ckpt_path)
        assert {run.epoch for run in strategy.runs} == {epochs}
        for rank in 0, 1:
            called = [note[1:] for note in notes if note[0] == rank]
            names = [name for _, name in called[::3]]
            expected = ["Callback", cls.__name__, "Callback"]
            assert called == [(whose, name) for name in names for whose in expected]
            assert names.count("on_train_epoch_end") == 1
            assert {"setup", "on_train_batch_end", "on_validation_end", "teardown"} <= {*names}
    state = torch.load(output / "last.ckpt", weights_only=True)
    assert len(state["fit"]["parts"]) == hasattr(cls, "state_dict")


@pytest.mark.parametrize("cls", OPTIONS)
def test_no_hookimpl_is_lost(cls):
    def hooks(plugin):
        found = [getattr(plugin, name, None) for name in dir(plugin)]
        found = [f for f in found if hasattr(f, "geartrain_impl")]
        return {f.__func__ for f in found}

    before = hooks(cls(**OPTIONS[cls]).as_plugin())
    after = hooks(noting(cls, [])(**OPTIONS[cls]).as_plugin())
    assert before < after
    assert len(after - before) == 5


def test_the_callback_works_also_if_a_method_has_the_name_of_a_hook():
    class Stopping(EarlyStopping):
        epochs = 0

        def on_validation_end(self, trainer, pl_module):
            super().on_validation_end(trainer, pl_module)
            self.epochs += 1

    stopping = Stopping("val_loss", min_delta=100, patience=1, check_on_train_epoch_end=False)
    trainer, _ = fit(stopping, ranks=1, max_epochs=5, num_sanity_val_steps=0)
    assert trainer.current_epoch == stopping.epochs == 2
    assert trainer.early_stopping_callback is stopping


def test_a_subclass_may_have_hookimpls_too_and_log():
    seen = []

    class Logs(ModelSummary):
        @hookimpl
        def on_epoch_end(self, run):
            seen.append(run.metrics["own"])

        def on_train_epoch_end(self, trainer, pl_module):
            self.log("own", trainer.current_epoch)

    fit(pickle.loads(pickle.dumps(Timer(9))), Logs(), ranks=1)
    assert seen == [0, 1]


@pytest.mark.parametrize(
    ("name", "marked", "message"),
    [
        ("on_epoch_end", False, "would never be called. Use instead: on_train_epoch_end"),
        ("on_run_start", False, "has a hook's name but no @hookimpl"),
        ("on_validation_end", True, "has @hookimpl.* Fix: .*specname='on_validation_end'"),
        ("on_train_epoch_ends", False, "Did you mean 'on_train_epoch_end'"),
    ],
)
def test_a_method_that_would_never_be_called_is_refused(name, marked, message):
    def method(self, run): ...

    cls = type("Own", (EarlyStopping,), {name: hookimpl(method) if marked else method})
    with pytest.raises(UsageError, match=f"Own.*{name}.*{message}"):
        fit(cls("val_loss"))
