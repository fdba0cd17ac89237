"""What callbacks and data modules keep in a checkpoint, and get back when a fit resumes."""

import numpy as np
import pytest
import torch
from small_models import Net, fit, loader, trainer
from threads import on_threads

import geartrain as gt
from geartrain.callbacks import Callback, EarlyStopping


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
