"""What callbacks and data modules keep in a checkpoint, and get back when a fit resumes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import EvalNet, Net, fit, loader, trainer
from threads import on_threads

import geartrain as gt
from geartrain.callbacks import Callback, EarlyStopping, ModelCheckpoint


class Remembers(Callback):
    """Keeps a list of the epochs that it saw."""

    def __init__(self):
        self.epochs, self.loaded = [], None

    def on_train_epoch_end(self, trainer, pl_module):
        self.epochs.append(trainer.current_epoch)

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        assert checkpoint["model"].keys() == pl_module.state_dict().keys()
        checkpoint["epochs"] = list(self.epochs)

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        self.epochs = self.loaded = checkpoint["epochs"]


def test_a_callback_adds_to_the_file_and_reads_it_in_a_fit_that_resumes(tmp_path):
    saves, resumes, starts = Remembers(), Remembers(), Remembers()
    runner = fit(callbacks=[saves], output=tmp_path)
    file = tmp_path / "last.ckpt"
    assert torch.load(file, weights_only=True)["epochs"] == [0]
    trainer(max_epochs=2, callbacks=[resumes]).fit(Net(), loader(), ckpt_path=file)
    assert resumes.epochs == [0, 1]
    trainer(callbacks=[starts]).fit(Net(), loader(), checkpoint=file)  # only the weights
    assert starts.loaded is None
    runner.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert "epochs" not in torch.load(tmp_path / "weights.ckpt", weights_only=True)


def test_a_subclass_of_a_callback_of_geartrain_does_too(tmp_path):
    class Stops(EarlyStopping):
        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            checkpoint["stops"] = 1

    fit(callbacks=[Stops("loss", check_on_train_epoch_end=True)], module=Logs(), output=tmp_path)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["stops"] == 1


class Logs(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_epoch=True, on_step=False)
        return loss


def test_each_rank_calls_it_and_rank_0s_is_written(tmp_path):
    class Ranks(Callback):
        seen = None

        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            checkpoint["rank"] = trainer.global_rank

        def on_load_checkpoint(self, trainer, pl_module, checkpoint):
            pl_module.seen = (trainer.global_rank, checkpoint["rank"])

    options = {"callbacks": [Ranks()], "output": tmp_path, "enable_progress_bar": False}
    on_threads(2, max_epochs=1, **options)[0].fit(Net(), loader(batch_size=2))
    again, strategy = on_threads(2, max_epochs=2, **options)
    again.fit(Net(), loader(batch_size=2), ckpt_path="last")
    assert [run.module.seen for run in strategy.runs] == [(0, 0), (1, 0)]


def test_a_value_that_could_not_be_read_again_is_an_error(tmp_path):
    class Saves(Callback):
        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            checkpoint["array"] = np.zeros(2)

    with pytest.raises(
        gt.TrainingError, match=r"Saves\.on_save_checkpoint put numpy\.ndarray under 'array'.*Fix: "
    ):
        fit(callbacks=[Saves()], output=tmp_path)
    assert not (tmp_path / "last.ckpt").exists()


def test_a_state_that_is_only_saved(tmp_path):
    class History(Callback):
        def state_dict(self):
            return {"rates": [0.1]}

    fit(callbacks=[History()], output=tmp_path)
    (rank,) = torch.load(tmp_path / "last.ckpt", weights_only=True)["fit"]["ranks"]
    assert rank["parts"] == {"History": {"rates": [0.1]}}
    trainer(max_epochs=2, callbacks=[History()], output=tmp_path).fit(
        Net(), loader(), ckpt_path="last"
    )
    lone = type("Loads", (Callback,), {"load_state_dict": lambda self, state: None})
    with pytest.raises(gt.UsageError, match=r"load_state_dict and no state_dict.*Fix: add"):
        trainer(callbacks=[lone()])


# --- data modules ---------------------------------------------------------------------------------


class Data(gt.DataModule):
    """Data of which each epoch uses more, and a count of the batches on each rank."""

    def __init__(self):
        self.level, self.levels = 1, []

    def train_dataloader(self):
        self.levels.append(self.level)
        return loader(4 * self.level, batch_size=2)

    def state_dict(self):
        return {"level": self.level, "rank": self.trainer.global_rank}

    def load_state_dict(self, state):
        self.level, self.rank = state["level"], state["rank"]


class Raises(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        trainer.datamodule.level += 1


def test_the_state_of_a_data_module_is_restored_before_its_loaders_are_used(tmp_path):
    options = {"callbacks": [Raises()], "output": tmp_path}
    trainer(**options).fit(Net(), datamodule=Data())
    data = Data()
    again = trainer(max_epochs=2, **options)
    again.fit(Net(), datamodule=data, ckpt_path="last")
    assert data.levels[-1] == 2
    assert again.global_step == 2 + 4


@pytest.mark.parametrize(("ranks", "expected"), [(2, [0, 1]), (1, [0])])
def test_each_rank_gets_its_state_and_those_of_another_world_rank_0s(tmp_path, ranks, expected):
    options = {"output": tmp_path, "enable_progress_bar": False}
    on_threads(2, max_epochs=1, **options)[0].fit(Net(), datamodule=Data())
    again, strategy = on_threads(ranks, max_epochs=2, **options)
    again.fit(Net(), datamodule=Data(), ckpt_path="last")
    assert [run.trainer.datamodule.rank for run in strategy.runs] == expected


def test_half_a_state_of_a_data_module_is_refused():
    half = type("Half", (Data,), {"load_state_dict": None})
    with pytest.raises(gt.UsageError, match=r"it has state_dict and no load_state_dict"):
        trainer().fit(Net(), datamodule=half())


# --- several of one class -------------------------------------------------------------------------


class Scores(EvalNet):
    """Metrics of the epochs: ``a`` is best in epoch 2, ``b`` in epoch 6."""

    def validation_step(self, batch, batch_idx):
        self.log("a", [5.0, 4.0, 3.0, 3.5, 3.6, 3.7, 3.8, 3.9][self.current_epoch])
        self.log("b", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 6.0][self.current_epoch])


class Named(Callback):
    """A user's callback: its options are its attributes, and one of them changes."""

    def __init__(self, name, seen=0):
        self.name, self.seen = name, seen

    def on_train_epoch_end(self, trainer, pl_module):
        self.seen += 10 if self.name == "tens" else 1

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def several(folder, patience=4):
    return [
        EarlyStopping("a", patience=patience),
        EarlyStopping("b", mode="max", patience=50),
        ModelCheckpoint(dirpath=folder / "a", monitor="a", filename="{epoch}"),
        ModelCheckpoint(dirpath=folder / "b", monitor="b", mode="max", filename="{epoch}"),
        Named("ones"),
        Named("tens"),
    ]


def ends(folder, epochs, callbacks, path=None):
    """Fit; return the epochs done, the best files, and the sums of ``Named``."""
    one = trainer(max_epochs=epochs, output=folder / "run", callbacks=callbacks)
    one.fit(Scores(), loader(), loader(), ckpt_path=path)
    best = {c.monitor: c.best_model_path for c in callbacks if isinstance(c, ModelCheckpoint)}
    sums = {c.name: c.seen for c in callbacks if isinstance(c, Named)}
    return one.current_epoch, {name: Path(path).stem for name, path in best.items()}, sums


@pytest.mark.parametrize(
    ("change", "epochs"),
    [
        (lambda folder: several(folder), 7),
        (lambda folder: several(folder)[::-1], 7),
        (lambda folder: [EarlyStopping("a", min_delta=0.5, patience=40), *several(folder)], 7),
        (lambda folder: several(folder, patience=5), 8),
    ],
    ids=["same", "in another order", "one more before them", "another option"],
)
@pytest.mark.filterwarnings("ignore:.*no saved state for geartrain-callbacks.early_stopping.")
def test_states_of_one_class_are_told_apart_by_metric_and_options(tmp_path, change, epochs):
    ends(tmp_path, 4, several(tmp_path))
    done, best, sums = ends(tmp_path, 8, change(tmp_path), "last")
    assert (done, best) == (epochs, {"a": "epoch=2", "b": "epoch=6"})
    assert sums == {"ones": epochs, "tens": 10 * epochs}


def test_a_state_of_another_metric_is_not_loaded(tmp_path):
    fit(Scores(), val=loader(), output=tmp_path, max_epochs=2, callbacks=[EarlyStopping("a")])
    stops = EarlyStopping("b", mode="max")
    with pytest.warns(UserWarning, match=r"no saved state for .*it has state of .*\(a, min\)"):
        trainer(max_epochs=3, output=tmp_path, callbacks=[stops]).fit(
            Scores(), loader(), loader(), ckpt_path="last"
        )
    assert stops.best_score == 3.0
