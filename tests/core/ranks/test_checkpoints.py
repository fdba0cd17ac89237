"""ModelCheckpoint on two ranks: both use the same file, also if their metrics differ."""

import pytest
import torch
from regression import Net, samples, weights
from threads import equal, on_threads
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain import hookimpl
from geartrain.callbacks import EMA, ModelCheckpoint


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


pytestmark = pytest.mark.filterwarnings("ignore:validate. .* is of rank 0's part")


class Own(Net):
    """Its metric falls on rank 0 and rises on rank 1, or the other way round, without sync_dist."""

    def __init__(self, sign=1):
        super().__init__()
        self.sign, self.tested = sign, []

    def validation_step(self, batch, batch_idx):
        epoch = self.sign * self.current_epoch
        self.log("metric", float(epoch if self.global_rank else -epoch))

    def test_step(self, batch, batch_idx):
        super().test_step(batch, batch_idx)
        self.tested.append(weights(self))


def fit(module, *plugins, epochs=2, **options):
    trainer, strategy = on_threads(max_epochs=epochs, plugins=plugins, **options)
    trainer.fit(module, DataLoader(samples(16), batch_size=2), DataLoader(samples(7), batch_size=2))
    return trainer, strategy


def states(strategy):
    """Return the state of each rank's ModelCheckpoint."""
    return [run.trainer.checkpoint_callback.state_dict() for run in strategy.runs]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def saved(path):
    return torch.load(path, weights_only=True)["model"]


def seven():
    return DataLoader(samples(7), batch_size=2)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Return the folder, the trainer and the strategy of a run whose ranks' metrics differ.

    Rank 1 alone would have selected the first epoch.
    """
    folder = tmp_path_factory.mktemp("own")
    keep = ModelCheckpoint("metric", dirpath=folder, filename="{epoch}", save_last=True)
    return folder, *fit(Own(), keep)


def test_both_ranks_name_rank_0s_best(own):
    folder, _, strategy = own
    first, second = states(strategy)
    assert first == second
    assert first["best_model_path"] == "epoch=1.ckpt"
    assert first["best_model_score"] == -1.0
    assert names(folder) == ["epoch=1.ckpt", "last.ckpt"]


def test_both_ranks_read_the_best_and_the_last(own):
    folder, trainer, strategy = own
    found = []
    for module, path in ((None, "best"), (Own(), "last")):
        found.append(trainer.test(module, seven(), ckpt_path=path))
        for run in strategy.runs:
            best = saved(folder / "epoch=1.ckpt")
            assert all(equal(state, best) for state in run.module.tested)
            assert found[-1] == [run.metrics]
    assert found[0] == found[1]


def test_both_ranks_test_the_best_if_it_is_not_the_last(tmp_path):
    trainer, strategy = fit(
        Own(-1), ModelCheckpoint("metric", dirpath="own", filename="{epoch}", save_top_k=-1)
    )
    trainer.test(ckpt_path="best", dataloaders=seven())
    first, last = (saved(tmp_path / "own" / f"epoch={epoch}.ckpt") for epoch in (0, 1))
    assert not equal(first, last)
    for run in strategy.runs:
        assert run.trainer.checkpoint_callback.best_model_path == "own/epoch=0.ckpt"
        assert equal(run.module.state_dict(), first)


@pytest.mark.parametrize("first", [0, 1])
def test_a_checkpoint_is_whole_on_every_rank_in_on_checkpoint_saved(first):
    """Also on a rank that gets there before rank 0 has written."""
    heard = [], []

    class Hears:
        @hookimpl
        def on_checkpoint_saved(self, run, path):
            heard[run.world.rank].append((str(path), path.is_file()))

    fit(
        Net(),
        ModelCheckpoint(
            "val_loss", dirpath="own", filename="{epoch}", save_top_k=-1, save_last=True
        ),
        Hears(),
        first=first,
    )
    names = [name for epoch in range(2) for name in (f"own/epoch={epoch}.ckpt", "own/last.ckpt")]
    assert heard == ([(name, True) for name in names],) * 2


def test_a_synced_metric_within_an_epoch(tmp_path):
    within = ModelCheckpoint("val_loss", dirpath="within", filename="{step}", save_top_k=-1)
    trainer, strategy = fit(Net(), within, val_check_interval=2, epochs=1)
    first, second = states(strategy)
    assert first == second
    assert first["best_k_models"]["step=4.ckpt"] == trainer.callback_metrics["val_loss"]
    assert names(tmp_path / "within") == ["step=2.ckpt", "step=4.ckpt"]


def test_in_the_runs_folder():
    _, strategy = fit(Net(), ModelCheckpoint("val_loss"), epochs=1, output="run")
    assert [run.trainer.checkpoint_callback.best_model_path for run in strategy.runs] == [
        "run/checkpoints/epoch=0-step=4.ckpt"
    ] * 2


class Counted(Net):
    """Logs the number of steps, and on rank 1 two more."""

    def __init__(self, sync_dist):
        super().__init__()
        self.sync_dist = sync_dist

    def training_step(self, batch, batch_idx):
        self.log("count", float(self.global_step + 2 * self.global_rank), sync_dist=self.sync_dist)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("sync_dist", "first"), [(True, 1.0), (False, 0.0)])
def test_by_steps_a_score_is_that_of_the_step_on_all_ranks(sync_dist, first):
    """Also if nothing is flushed: the mean, or rank 0's."""
    monitor = ModelCheckpoint(
        "count", dirpath="own", filename="{step}", every_n_train_steps=1, save_top_k=-1
    )
    _, strategy = fit(Counted(sync_dist), monitor, epochs=1, log_every_n_steps=50)
    for state in states(strategy):
        assert state["best_k_models"] == {
            f"step={step + 1}.ckpt": first + step for step in range(4)
        }


def test_averaged_weights_are_tested_with_the_buffers_of_their_validation(tmp_path):
    """BatchNorm's statistics are not the same on both ranks."""
    averaged = ModelCheckpoint("val_loss", dirpath="averaged", save_top_k=-1)
    trainer, strategy = fit(Net(norm=True), averaged, EMA(0.7))
    scores = averaged.best_k_models
    assert len(set(scores.values())) == 2
    assert all(run.trainer.checkpoint_callback.best_k_models == scores for run in strategy.runs)
    for path, score in scores.items():
        trainer.test(dataloaders=seven(), ckpt_path=path)
        assert [run.metrics["test_loss"] for run in strategy.runs] == [score] * 2
    state = torch.load(next(iter(scores)), weights_only=True)
    assert not equal(state["model"], state["trained"])


def test_a_metric_that_rank_0_does_not_log_fails_both(tmp_path):
    class Only(Net):
        def validation_step(self, batch, batch_idx):
            if self.global_rank == 1:
                self.log("second only", 1.0)

    told = {}

    class Tells:
        @hookimpl
        def on_exception(self, run, error):
            told[run.world.rank] = str(error)

    with pytest.raises(gt.TrainingError, match="'second only', which was not logged"):
        fit(Only(), ModelCheckpoint("second only", dirpath="own"), Tells(), first=1)
    assert told[0] == told[1]
    assert not (tmp_path / "own").exists()
