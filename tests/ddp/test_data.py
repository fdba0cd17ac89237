"""Shards of the data on real ranks."""

import os

import pytest
import torch
from several_ranks import results, succeeded
from torch.utils.data import DataLoader, IterableDataset

from geartrain.callbacks import ModelCheckpoint

from .cases import Net, ddp, one_trainer, samples


class Gathers(Net):
    def __init__(self, **options):
        super().__init__(**options)
        self.gathered = []

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.gathered.append(len(self.all_gather(batch[0])))


#: Numbers of samples and batch sizes. 103 samples are 6 batches of 5 on one rank of four; the last
#: batch of the others is smaller. With 3 samples one rank has none.
SHAPES = [(103, 5), (103, 1), (3, 2)]


def validate_unequal_batches():
    module, trainer = Gathers(norm=True), ddp(devices=4)
    found = [
        trainer.validate(module, DataLoader(samples(n), batch_size=size))[0] for n, size in SHAPES
    ]
    return found, module.gathered


def test_unequal_batches_on_four_ranks_give_the_metrics_of_one_rank(tmp_path):
    ranks = results(tmp_path, validate_unequal_batches, ranks=4)
    for i, (n, _) in enumerate(SHAPES):
        expected = one_trainer().validate(Net(norm=True), DataLoader(samples(n), batch_size=7))[0]
        assert expected["samples"] == n
        for found, _ in ranks:
            assert found[i] == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert [gathered for _, gathered in ranks] == [[4] * (6 + 26 + 1)] * 4


class Mine(IterableDataset):
    """Rank 0 has 5 batches and rank 1 has 3; the length is unknown."""

    def __iter__(self):
        rank = int(os.environ["RANK"])
        return iter([(torch.ones(3), torch.ones(1) * rank)] * ((5, 3)[rank] * 2))


class Sees(Net):
    def validation_step(self, batch, batch_idx):
        self.gathered = self.all_gather(batch[1].sum()).tolist()
        self.log("seen", float(len(batch[0])), reduce_fx="sum", sync_dist=True)


def train_unevenly():
    trainer = ddp(max_epochs=2, limit_train_batches=10)
    trainer.fit(Net(), DataLoader(Mine(), batch_size=2))
    return trainer.global_step


def test_training_loaders_without_a_length_end_together(tmp_path):
    ranks = succeeded(tmp_path, train_unevenly)
    assert [rank.result for rank in ranks] == [6, 6]
    assert any(
        "the training loaders of ranks [1] have run out before the others'" in rank.printed
        for rank in ranks
    )


def validate_unevenly():
    module = Sees()
    return ddp().validate(module, DataLoader(Mine(), batch_size=2)), module.gathered


def test_evaluation_loaders_without_a_length_use_every_batch(tmp_path):
    for found, gathered in results(tmp_path, validate_unevenly):
        assert found == [{"seen": 16.0}]
        assert gathered == [0.0, 2.0]  # rank 1 repeats its last batch


class Both(Net):
    """Trains on two loaders and notes the samples of each batch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append({name: one[0].flatten().tolist() for name, one in batch.items()})
        return super().training_step(batch["a"], batch_idx) + super().training_step(
            batch["b"], batch_idx
        )


def train_on_two_loaders(folder, path=None):
    module, options = Both(), {"shuffle": True, "num_workers": 1}
    every = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    data = {
        "a": DataLoader(samples(12), batch_size=2, **options),
        "b": DataLoader(samples(40), batch_size=2, persistent_workers=True, **options),
    }
    ddp(max_epochs=2, seed=1, plugins=[every]).fit(module, data, ckpt_path=path)
    return module.seen


def train_and_resume(folder):
    whole = train_on_two_loaders(f"{folder}/whole")
    rests = {
        step: train_on_two_loaders(f"{folder}/{step}", f"{folder}/whole/step={step}.ckpt")
        for step in (5, 10, 14)  # after the shorter began again; between epochs; in the second
    }
    return whole, rests


@pytest.mark.end_to_end
def test_several_training_loaders_are_sharded_and_resume(tmp_path):
    ranks = results(tmp_path, train_and_resume, str(tmp_path))
    for whole, rests in ranks:
        assert len(whole) == 20
        for step, rest in rests.items():
            assert rest == whole[step:]
    for batches in zip(*(whole[:10] for whole, _ in ranks), strict=True):
        assert batches[0]["b"] != batches[1]["b"]
