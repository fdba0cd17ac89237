"""``reload_dataloaders_every_n_epochs``: when loaders are made again, and what a resume makes."""

import math

import psutil
import pytest
import torch
from small_models import EvalNet, assert_equal, loader, samples, trainer
from torch.utils.data import DataLoader, TensorDataset, random_split

from geartrain import TrainingError, UsageError
from geartrain.callbacks import ModelCheckpoint
from geartrain.testing import ThreadRanks


class Again(EvalNet):
    """Makes loaders that differ from epoch to epoch, and notes the epoch of each call."""

    def __init__(self, workers=0, size=4):
        super().__init__()
        self.made, self.validated, self.batches = [], [], []
        self.options = {"batch_size": size}
        if workers:
            self.options |= {"num_workers": workers, "persistent_workers": True}

    def train_dataloader(self):
        epoch = self.trainer.current_epoch
        self.made.append(epoch)
        some, _ = random_split(samples(24), [8 + epoch, 16 - epoch])
        return DataLoader(some, shuffle=True, **self.options)

    def val_dataloader(self):
        self.validated.append(self.trainer.current_epoch)
        return loader()

    def training_step(self, batch, batch_idx):
        self.batches.append(len(batch[0]))
        return super().training_step(batch, batch_idx)


def fit(net=None, every=2, strategy="single", **options):
    net = net or Again()
    options = {"max_epochs": 5, "seed": 1, "num_sanity_val_steps": 0} | options
    one = trainer(strategy=strategy, reload_dataloaders_every_n_epochs=every, **options)
    one.fit(net)
    return net


@pytest.mark.parametrize(("every", "made"), [(0, [0]), (2, [0, 2, 4]), (9, [0])])
def test_loaders_are_made_in_each_nth_epoch(every, made):
    net = fit(every=every)
    assert net.made == net.validated == made


def test_no_loader_is_made_to_validate_if_no_validation_comes_before_the_next():
    net = fit(every=1, max_epochs=6, check_val_every_n_epoch=3)
    assert net.validated == [0, 2, 5]


@pytest.mark.parametrize(("ranks", "accumulate"), [(1, 2), (2, 1)])
def test_an_epoch_has_the_batches_of_its_loader(ranks, accumulate):
    class Counts(Again):
        def on_train_epoch_start(self):
            counts.append((self.trainer.current_epoch, self.trainer.num_training_batches))

    counts = []
    strategy = ThreadRanks(2) if ranks == 2 else "single"
    fit(Counts(), every=1, strategy=strategy, accumulate_grad_batches=accumulate)
    expected = [(n, math.ceil(math.ceil((8 + n) / ranks) / 4)) for n in range(5)]
    assert sorted(set(counts)) == expected


def test_old_workers_end():
    def workers():
        return [p for p in psutil.Process().children(recursive=True) if "resource" not in p.name()]

    counts, before = [], len(workers())

    class Counts(Again):
        def on_train_epoch_end(self):
            counts.append(len(workers()) - before)

    fit(Counts(workers=1), every=1, max_epochs=3)
    assert counts == [1, 1, 1]
    assert len(workers()) == before


@pytest.mark.parametrize(("every", "step"), [(1, 5), (2, 4), (2, 6), (3, 9)])
def test_a_run_that_resumes_has_the_same_loaders(tmp_path, every, step):
    def run(folder, **options):
        saver = ModelCheckpoint(
            dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1
        )
        one = trainer(
            plugins=[saver], max_epochs=4, seed=1, reload_dataloaders_every_n_epochs=every
        )
        net = Again()
        one.fit(net, **options)
        return net

    torch.manual_seed(0)
    whole = run(tmp_path / "whole")
    torch.rand(3)
    assert_equal(whole, run(tmp_path / "again", ckpt_path=tmp_path / "whole" / f"step={step}.ckpt"))


def test_means_are_weighted_by_the_batch_size_of_the_new_loader():
    class Sizes(EvalNet):
        def train_dataloader(self):
            size = 8 if self.trainer.current_epoch else 3
            return DataLoader(TensorDataset(torch.arange(12.0)[:, None]), batch_size=size)

        def training_step(self, batch, batch_idx):
            self.log("mean", batch[0].mean(), on_step=False, on_epoch=True)
            return sum(p.sum() for p in self.parameters()) * 0

    one = trainer(max_epochs=2, reload_dataloaders_every_n_epochs=1)
    one.fit(Sizes())
    assert one.callback_metrics["mean"] == pytest.approx(5.5)


def test_loaders_that_were_given_are_refused():
    one = trainer(reload_dataloaders_every_n_epochs=1)
    with pytest.raises(UsageError, match=r"these were given\. Fix: return them from train_data"):
        one.fit(Again(), loader())
    with pytest.raises(UsageError, match=r"Fix: return them from val_dataloader of the module"):
        one.fit(Again(), val_dataloaders=loader())
    with pytest.raises(UsageError, match="reload_dataloaders_every_n_epochs=-1 must be"):
        trainer(reload_dataloaders_every_n_epochs=-1)


def test_an_epoch_whose_loader_is_empty_is_an_error():
    class Empty(EvalNet):
        def train_dataloader(self):
            return [] if self.trainer.current_epoch else loader()

    with pytest.raises(TrainingError, match="the train loader is empty"):
        trainer(max_epochs=2, reload_dataloaders_every_n_epochs=1).fit(Empty())
