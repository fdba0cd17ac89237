"""predict returns every output on every rank, in the loader's order."""

import threading

import pytest
import torch
from regression import one_trainer
from threads import on_threads
from torch.utils.data import DataLoader, DistributedSampler

import geartrain_parallel.predictions
from geartrain import TrainingError

from ...ddp.predictions import Doubles, Numbers, all_in_order, numbers


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b


def predicted(loaders, form=None, **options):
    """Return the results of predict on each of two ranks."""
    trainer, strategy = on_threads(**options)
    trainer.predict(Doubles(form), loaders)
    return strategy.results


@pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"
)
def test_ranks_predict_the_same_as_one_process(monkeypatch):
    monkeypatch.setattr(geartrain_parallel.predictions, "_CHUNK", 1)  # a chunk for each output
    strategies = []

    def trainer(**options):
        trainer, strategy = on_threads(**options)
        strategies.append(strategy)
        return trainer

    expected, found = all_in_order(one_trainer), all_in_order(trainer)
    assert found.keys() == expected.keys()
    for (name, outputs), strategy in zip(expected.items(), strategies, strict=True):
        assert same(found[name], outputs), name
        assert same(strategy.results[1], outputs), name


def test_an_order_that_each_rank_would_draw_is_rank_0s():
    for outputs in predicted(
        DataLoader(range(50), batch_size=3, shuffle=True, generator=torch.Generator())
    ):
        assert sorted(torch.cat(outputs).tolist()) == list(range(0, 100, 2))
        assert [len(batch) for batch in outputs] == [3] * 16 + [2]


def test_outputs_of_loaders_that_ranks_do_not_share_come_rank_by_rank():
    with pytest.warns(
        UserWarning, match="predict returns the outputs of rank 0, then those of rank 1"
    ):
        found = predicted(DataLoader(Numbers(), batch_size=3))
    assert [[batch.tolist() for batch in outputs] for outputs in found] == [
        [[0, 2, 4], [6, 8]] * 2
    ] * 2
    found = predicted(numbers(4), use_distributed_sampler=False)
    assert [[batch.tolist() for batch in outputs] for outputs in found] == [
        [[0, 2, 4], [6]] * 2
    ] * 2


def test_a_distributed_sampler_of_the_users_own_is_kept():
    class Own(Doubles):
        def predict_dataloader(self):
            return numbers(
                4, sampler=DistributedSampler(range(4), 2, self.global_rank, shuffle=False)
            )

    trainer, strategy = on_threads()
    trainer.predict(Own())
    assert [[batch.tolist() for batch in outputs] for outputs in strategy.results] == [
        [[0, 4], [2, 6]]
    ] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_an_output_that_cannot_be_sent_is_named(rank):
    class Sends(Doubles):
        def predict_step(self, batch, batch_idx):
            return {"x": [threading.Lock() if self.global_rank == rank else 1]}

    trainer, _ = on_threads()
    with pytest.raises(
        TrainingError,
        match=rf"rank {rank} cannot send the results of predict_step to the others: output 0",
    ):
        trainer.predict(Sends(), numbers(4))
