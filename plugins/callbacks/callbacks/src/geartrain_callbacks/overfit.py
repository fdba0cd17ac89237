"""``overfit``: the same first batches in each epoch. ``Trainer(overfit_batches=...)`` adds it."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from geartrain import Run, UsageError, hookimpl
from geartrain.plugin_api import warn, with_samplers


class Overfit:
    """Turns off the shuffling of the loaders to train and to validate, before they are sharded."""

    added_for = "overfit_batches"

    @hookimpl(wrapper=True)
    def setup_device(self, run: Run) -> Generator[None, torch.device, torch.device]:
        self._shard = run.hooks.replace_caller("shard_dataloader", self._shard_in_order)
        return (yield)

    def _shard_in_order(self, run: Run, loader: Iterable[Any], stage: str) -> Any:
        if stage in ("train", "validate"):
            loader = _in_fixed_order(loader, stage, warns=run.world.rank == 0)
        return self._shard(run=run, loader=loader, stage=stage)


def _in_fixed_order(loader: Any, stage: str, warns: bool) -> Any:
    """Return a loader without its shuffling, so that each epoch has the same first batches.

    Source: ``overfit_batches`` of Lightning, which replaces a random sampler by a sequential one.

    Args:
        loader: the user's loader. Without a dataset of some length it is returned as it is.
        stage: its name, for the warning.
        warns: True to warn if the order changes, or cannot be changed.

    Raises:
        UsageError: it is an iterator, so no epoch has the batches of another.
    """
    if isinstance(loader, Iterator):
        message = f"overfit_batches repeats batches, and the {stage} loader is an iterator"
        raise UsageError(f"{message}. Fix: use a DataLoader or a list")
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    batches = loader.batch_sampler
    of_torch = batches is None or type(batches) is BatchSampler
    sampler = loader.sampler if of_torch else batches
    fixed = _without_shuffling(sampler, loader.dataset)
    if fixed is sampler:
        return loader
    if warns:
        message = f"overfit_batches turns off the shuffling of the {stage} loader"
        if fixed is None:
            message = f"overfit_batches keeps the order of {type(sampler).__name__}, which "
            message += (
                f"the {stage} loader draws from: if it shuffles, epochs have different batches"
            )
        warn(message)
    if fixed is None:
        return loader
    if isinstance(batches, BatchSampler):
        batches = BatchSampler(fixed, batches.batch_size, batches.drop_last)
    return with_samplers(loader, fixed, batches)


def _without_shuffling(sampler: Any, dataset: Any) -> Any:
    """Return one of torch's samplers without its shuffling; ``None`` for another class."""
    if type(sampler) is SequentialSampler:
        return sampler
    if type(sampler) in (RandomSampler, WeightedRandomSampler):
        return SequentialSampler(dataset)
    if type(sampler) is SubsetRandomSampler:
        return list(sampler.indices)
    if type(sampler) is DistributedSampler:
        fixed = copy.copy(sampler)
        fixed.shuffle = False
        return fixed
    return None
