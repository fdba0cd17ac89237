"""Each rank's part of the data, and ranks with unequal numbers of batches."""

import pytest
import torch
from regression import Net, samples
from threads import on_threads
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import geartrain as gt


class Uneven(IterableDataset):
    """Rank 0 has 5 batches of 2 and rank 1 has 3; neither loader has a length."""

    def __init__(self, module):
        self.module = module

    def __iter__(self):
        rank = self.module.global_rank
        return iter([(torch.ones(3), torch.ones(1) * rank)] * ((5, 3)[rank] * 2))


class Streams(Net):
    def __init__(self):
        super().__init__()
        self.gathered = None

    def train_dataloader(self):
        return DataLoader(Uneven(self), batch_size=2)

    val_dataloader = train_dataloader

    def validation_step(self, batch, batch_idx):
        self.gathered = self.all_gather(batch[1].sum()).tolist()
        self.log("seen", float(len(batch[0])), reduce_fx="sum", sync_dist=True)


@pytest.mark.filterwarnings("ignore:.*cannot be sharded")
def test_evaluation_loaders_without_a_length_use_every_batch():
    trainer, strategy = on_threads()
    trainer.validate(Streams())
    for run in strategy.runs:
        assert run.metrics == {"seen": 16.0}
        assert run.module.gathered == [0.0, 2.0]  # rank 1 repeats its last


@pytest.mark.filterwarnings("ignore:.*cannot be sharded")
def test_a_rank_that_never_has_a_batch_is_named():
    class Nothing(Uneven):
        def __iter__(self):
            return iter([]) if self.module.global_rank else super().__iter__()

    class NoneOnOne(Streams):
        def val_dataloader(self):
            return DataLoader(Nothing(self), batch_size=2)

    trainer, _ = on_threads()
    with pytest.raises(
        gt.TrainingError, match="the validate loader gives rank 1 no batch, and others some"
    ):
        trainer.validate(NoneOnOne())


def test_training_loaders_of_different_lengths_are_refused():
    class Unequal(Net):
        def train_dataloader(self):
            n = 8 + 4 * self.global_rank
            return DataLoader(samples(n), batch_size=2, sampler=DistributedSampler(range(n), 1, 0))

    trainer, _ = on_threads()
    with pytest.raises(
        gt.TrainingError,
        match=r"the ranks' training loaders have different lengths: \[4, 6\] batches, rank by rank",
    ):
        trainer.fit(Unequal())


def test_ranks_with_other_numbers_of_loaders_are_refused():
    class OnRank0(Net):
        def val_dataloader(self):
            return DataLoader(samples(), batch_size=4) if self.trainer.is_global_zero else None

    trainer, _ = on_threads()
    with pytest.raises(
        gt.TrainingError,
        match=r"validate: the ranks have \[1, 0\] loaders, rank by rank. Fix",
    ):
        trainer.fit(OnRank0(), DataLoader(samples(), batch_size=4))


class Sees(Net):
    """Records the numbers that it trained on in each epoch."""

    def __init__(self, loader):
        super().__init__()
        self.loader, self.seen = loader, [[], []]

    def train_dataloader(self):
        return self.loader

    def training_step(self, batch, batch_idx):
        self.seen[self.current_epoch] += batch.tolist()
        return self(torch.ones(1, 3)).sum()


def test_without_a_seed_ranks_share_each_epoch_in_an_order_of_its_own():
    trainer, strategy = on_threads(max_epochs=2, seed=None)
    trainer.fit(Sees(DataLoader(range(24), batch_size=3, shuffle=True)))
    first, second = (run.module.seen for run in strategy.runs)
    for epoch in range(2):
        assert sorted(first[epoch] + second[epoch]) == list(range(24))
    assert first[0] != first[1]


def test_nothing_is_sharded_if_sharding_is_turned_off():
    trainer, strategy = on_threads(use_distributed_sampler=False)
    trainer.fit(Sees(DataLoader(range(6), batch_size=3)))
    assert [run.module.seen[0] for run in strategy.runs] == [list(range(6))] * 2


def test_prepare_data_runs_once_a_node_and_setup_on_every_rank():
    called = []

    class Data(gt.DataModule):
        def prepare_data(self):
            called.append("prepare_data")

        def setup(self, stage):
            called.append(f"setup on rank {self.trainer.global_rank}")

        def train_dataloader(self):
            return DataLoader(samples(8), batch_size=2)

    trainer, _ = on_threads()
    trainer.fit(Net(), datamodule=Data())
    assert called == ["prepare_data", "setup on rank 0", "setup on rank 1"]
