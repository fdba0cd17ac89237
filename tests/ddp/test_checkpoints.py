"""The best checkpoint on two ranks: both use the same file even if their metrics differ."""

import os
import time

import pytest
import torch
from several_ranks import failed, results
from torch.utils.data import DataLoader

from geartrain import hookimpl
from geartrain.callbacks import EMA, ModelCheckpoint

from .cases import Net, ddp, samples, weights


class Own(Net):
    """Its metric falls on rank 0 and rises on rank 1, without sync_dist."""

    def __init__(self):
        super().__init__()
        self.tested = []

    def validation_step(self, batch, batch_idx):
        epoch = self.current_epoch
        self.log("metric", float(epoch if self.global_rank else -epoch))

    def test_step(self, batch, batch_idx):
        super().test_step(batch, batch_idx)
        self.tested.append(weights(self))


class Slow:
    """Writes late, so that a rank that does not wait finds no file."""

    def __init__(self):
        self.whole = []

    @hookimpl(wrapper=True)
    def save_checkpoint(self, run):
        if run.world.rank == 0:
            time.sleep(0.1)
        return (yield)

    @hookimpl
    def on_checkpoint_saved(self, run, path):
        self.whole.append((str(path), path.is_file()))


def fit(module, *plugins, epochs=3, **options):
    trainer = ddp(max_epochs=epochs, plugins=plugins, **options)
    trainer.fit(module, DataLoader(samples(16), batch_size=2), DataLoader(samples(7), batch_size=2))
    return trainer


def save_and_read():
    """Run fits whose metric differs between ranks, and test their checkpoints."""
    found = {}
    own = ModelCheckpoint("metric", dirpath="own", filename="{epoch}", save_last=True)
    module, same, slow = Own(), Own(), Slow()
    trainer = fit(module, own, slow)
    found["own"] = own.state_dict()
    test = DataLoader(samples(7), batch_size=2)
    found["best"] = trainer.test(dataloaders=test, ckpt_path="best")
    found["last"] = trainer.test(same, test, ckpt_path="last")
    found["tested"], found["whole"] = module.tested + same.tested, slow.whole
    other = ModelCheckpoint("metric", mode="max", dirpath="max", filename="{epoch}", save_top_k=2)
    fit(Own(), other)
    found["max"] = other.state_dict()
    within = ModelCheckpoint("val_loss", dirpath="within", filename="{step}", save_top_k=-1)
    trainer = fit(Net(), within, val_check_interval=2, epochs=1)
    found["within"], found["val_loss"] = within.state_dict(), trainer.run.metrics["val_loss"]
    by_steps = ModelCheckpoint(
        "loss", dirpath="steps", filename="{step}", every_n_train_steps=2, save_top_k=-1
    )
    fit(Net(), by_steps, epochs=1)
    found["steps"] = by_steps.state_dict()
    folder = ModelCheckpoint("val_loss")
    fit(Net(), folder, epochs=1, output="run")
    found["folder"] = folder.best_model_path
    averaged = ModelCheckpoint("val_loss", dirpath="averaged", save_top_k=-1)
    # BatchNorm's statistics differ between ranks.
    trainer = fit(Net(norm=True), averaged, EMA(0.7))
    found["scores"] = averaged.best_k_models
    found["again"] = {
        path: trainer.test(dataloaders=test, ckpt_path=path)[0]["test_loss"]
        for path in averaged.best_k_models
    }
    return found


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Return the folder, and each rank's results."""
    folder = tmp_path_factory.mktemp("kept")
    return folder, results(folder, save_and_read)


def saved_weights(path):
    return torch.load(path, weights_only=True)["model"]


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_both_ranks_name_rank_0s_best(kept):
    _, ranks = kept
    for rank in ranks:
        # By its own metric, rank 1 would take the first epoch with "min" and the last with "max".
        assert rank["own"]["best_model_path"] == "epoch=2.ckpt"
        assert rank["own"]["best_model_score"] == -2.0
        assert rank["max"]["best_k_models"] == {"epoch=0.ckpt": 0.0, "epoch=1.ckpt": -1.0}
    assert ranks[0]["own"] == ranks[1]["own"]


def test_only_rank_0s_files_exist(kept):
    folder, _ = kept
    found = {
        name: sorted(path.name for path in (folder / name).iterdir())
        for name in ("own", "max", "within", "steps")
    }
    assert found == {
        "own": ["epoch=2.ckpt", "last.ckpt"],
        "max": ["epoch=0.ckpt", "epoch=1.ckpt"],
        "within": ["step=2.ckpt", "step=4.ckpt"],
        "steps": ["step=2.ckpt", "step=4.ckpt"],
    }


def test_both_ranks_read_the_best_and_the_last(kept):
    folder, ranks = kept
    for rank in ranks:
        tested = rank["tested"]
        assert all(equal(state, saved_weights(folder / "own" / "epoch=2.ckpt")) for state in tested)
        assert rank["best"] == rank["last"] == ranks[0]["best"]


def test_a_checkpoint_is_complete_on_every_rank_when_its_hook_fires(kept):
    _, ranks = kept
    names = [name for epoch in range(3) for name in (f"own/epoch={epoch}.ckpt", "own/last.ckpt")]
    for rank in ranks:
        assert rank["whole"] == [(name, True) for name in names]


def test_a_synced_metric_within_an_epoch(kept):
    _, ranks = kept
    assert ranks[0]["within"] == ranks[1]["within"]
    for rank in ranks:
        assert rank["within"]["best_k_models"]["step=4.ckpt"] == rank["val_loss"]
        assert list(rank["steps"]["best_k_models"]) == ["step=2.ckpt", "step=4.ckpt"]
        assert rank["folder"] == "run/checkpoints/epoch=0-step=4.ckpt"


def test_averaged_weights_give_the_validated_score_again(kept):
    folder, ranks = kept
    for rank in ranks:
        assert len(set(rank["scores"].values())) == 3
        assert rank["again"] == rank["scores"] == ranks[0]["scores"]
    state = torch.load(folder / next(iter(ranks[0]["scores"])), weights_only=True)
    assert not equal(state["model"], state["trained"])


class Rises(Net):
    """Its metric rises on rank 0 and falls on rank 1."""

    def validation_step(self, batch, batch_idx):
        epoch = self.current_epoch
        self.log("metric", float(-epoch if self.global_rank else epoch))


def read_the_best():
    """Test the best checkpoint, which is not the last, and return its weights, metrics and path."""
    module = Rises()
    trainer = fit(
        module, ModelCheckpoint("metric", dirpath="own", filename="{epoch}", save_top_k=-1)
    )
    seen = trainer.test(ckpt_path="best", dataloaders=DataLoader(samples(7), batch_size=2))
    return {
        "weights": weights(module),
        "seen": seen,
        "path": trainer.checkpoint_callback.best_model_path,
    }


def test_both_ranks_test_the_best_if_it_is_not_the_last(tmp_path):
    ranks = results(tmp_path, read_the_best)
    first, last = (saved_weights(tmp_path / "own" / f"epoch={epoch}.ckpt") for epoch in (0, 2))
    assert not equal(first, last)
    for rank in ranks:
        assert rank["path"] == "own/epoch=0.ckpt"
        assert equal(rank["weights"], first)
        assert rank["seen"] == ranks[0]["seen"]


class LogsOnRank1(Net):
    def validation_step(self, batch, batch_idx):
        if self.global_rank == 1:
            self.log("second only", 1.0)


def watch_what_rank_0_does_not_log():
    fit(LogsOnRank1(), ModelCheckpoint("second only", dirpath="own"))


def test_a_metric_that_rank_0_does_not_log_fails_both(tmp_path):
    first, second = failed(tmp_path, watch_what_rank_0_does_not_log)
    assert "'second only', which was not logged" in first.error
    assert first.error == second.error
    assert not (tmp_path / "own").exists()


def read_different_files():
    path = f"of-{os.environ['RANK']}.ckpt"
    torch.save({"model": Net().state_dict()}, path)
    ddp().test(Net(), DataLoader(samples(4)), ckpt_path=path)


def test_ranks_that_are_given_different_files_are_refused(tmp_path):
    _, second = failed(tmp_path, read_different_files)
    assert (
        "rank 1 differs from rank 0 in the checkpoint: 'of-0.ckpt' there and 'of-1.ckpt' here"
        in second.error
    )
