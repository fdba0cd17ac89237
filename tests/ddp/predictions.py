"""Predictions, by name, that the tests make in one process and in several."""

import os

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

import geartrain as gt


class Doubles(gt.Module):
    """Returns tensors, converted by ``form``."""

    def __init__(self, form=None):
        super().__init__()
        self.form, self.layer = form, torch.nn.Linear(1, 1)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self.form(batch) if self.form else batch * 2 + 100 * dataloader_idx


class Lengthless(Sampler):
    def __iter__(self):
        return iter([[0, 1], [2], [3, 4, 5]])


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(5))


def numbers(n, batch_size=3, **options):
    return DataLoader(range(n), batch_size=batch_size, **options)


def all_in_order(trainer):
    """Return the predictions of all cases. Ranks must return the same as one process.

    Args:
        trainer: called with options, returns a Trainer.
    """
    found = {}

    def predict(name, loaders, form=None, **options):
        found[name] = trainer(**options).predict(Doubles(form), loaders)

    predict("uneven", numbers(11))
    predict("a batch for one rank only", numbers(2))
    predict("drop_last", numbers(11, 4, drop_last=True))
    predict("no batches", DataLoader(torch.arange(5), batch_size=None))
    predict("batch sampler", DataLoader(range(6), batch_sampler=[[5, 0], [1], [2, 3, 4]]))
    predict("batch sampler without length", DataLoader(range(6), batch_sampler=Lengthless()))
    predict("limit", numbers(11), limit_predict_batches=3)
    predict("limit of one", numbers(11), limit_predict_batches=1)
    predict("limit by a fraction", numbers(11), limit_predict_batches=0.8)
    predict(
        "limit without length",
        DataLoader(range(6), batch_sampler=Lengthless()),
        limit_predict_batches=1,
    )
    predict("fast_dev_run", numbers(11), fast_dev_run=True)
    predict("several loaders", [numbers(7), numbers(2), numbers(4)])
    predict("workers", numbers(7, num_workers=1, persistent_workers=True))
    predict(
        "dicts",
        numbers(7),
        lambda batch: {"x": batch, "name": f"{len(batch)} numbers", "more": (batch[:1], [1.5])},
    )
    predict("None", numbers(7), lambda batch: None)
    return found


def of_ranks(trainer):
    """Return predictions of loaders that are not sharded: those of rank 0, then those of rank 1."""
    place = {
        "num_replicas": int(os.environ.get("WORLD_SIZE", 1)),
        "rank": int(os.environ.get("RANK", 0)),
        "shuffle": False,
    }
    return {
        "iterable": trainer().predict(Doubles(), DataLoader(Numbers(), batch_size=3)),
        "not sharded": trainer(use_distributed_sampler=False).predict(Doubles(), numbers(4)),
        "DistributedSampler": trainer().predict(
            Doubles(), numbers(4, sampler=DistributedSampler(range(4), **place))
        ),
    }
