"""Read and set a loader's samplers: the epoch's order, and the part of this rank."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    Sampler,
)

from geartrain.data.loaders import length, single_loaders


class Shard(Sampler[Any]):
    """One rank's items of another sampler; geartrain-parallel's subclasses select them.

    Args:
        sampler: gives the same items in the same order on every rank.
        rank: this rank, from 0.
        size: the number of ranks.
        even: True if each rank gets equally many items (training). Otherwise no item comes twice
            (evaluation), and ranks differ by one at most.
        seed: of the order; the same on every rank.
    """

    def __init__(self, sampler: Any, rank: int, size: int, even: bool, seed: int) -> None:
        self.sampler, self.rank, self.size = sampler, rank, size
        self.even, self.seed, self.epoch = even, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, and so the order, which is the same on every rank."""
        self.epoch = epoch
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    @property
    def empty(self) -> bool:
        """True if this rank has no item and another rank has one."""
        total = length(self.sampler)
        return total is not None and 0 < total <= self.rank


def is_empty_shard(loader: Any) -> bool:
    """True if this rank's part of an evaluation loader is empty, so it repeats another's sample."""
    shards = [sampler for sampler in samplers(loader) if isinstance(sampler, Shard)]
    return any(not shard.even and shard.empty for shard in shards)


def batches_in_turn(loader: Any) -> Shard | None:
    """Return the Shard that gives ranks whole evaluation batches in turn; ``None`` without one."""
    batches = getattr(loader, "batch_sampler", None)
    batch_shard = getattr(loader, "sampler", None) if batches is None else batches
    return batch_shard if isinstance(batch_shard, Shard) and not batch_shard.even else None


def set_epoch(loader: Any, epoch: int) -> None:
    """Set the epoch of a loader's samplers."""
    for sampler in samplers(loader):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def order_seeds(loader: Any) -> list[int]:
    """Return the seeds of a sharded loader's order."""
    return [sampler.seed for sampler in samplers(loader) if isinstance(sampler, Shard)]


def set_order_seeds(loader: Any, seeds: list[int]) -> None:
    """Give a sharded loader the order of another; change no loader that is or was not sharded."""
    shards = [sampler for sampler in samplers(loader) if isinstance(sampler, Shard)]
    for sampler, seed in zip(shards, seeds, strict=False):
        sampler.seed = seed


def generators(loader: Any) -> Iterator[torch.Generator]:
    """Yield the generators from which a loader draws its order."""
    for thing in (*single_loaders(loader), *samplers(loader)):
        generator = getattr(thing, "generator", None)
        if isinstance(generator, torch.Generator):
            yield generator


def samplers(loader: Any) -> list[Any]:
    """Return a loader's sampler, its batch sampler and the sampler in that, each once."""
    found: list[Any] = []
    for single_loader in single_loaders(loader):
        batches = getattr(single_loader, "batch_sampler", None)
        found += (
            getattr(single_loader, "sampler", None),
            batches,
            getattr(batches, "sampler", None),
        )
    return list({id(sampler): sampler for sampler in found if sampler is not None}.values())


def with_samplers(loader: DataLoader[Any], sampler: Any, batch_sampler: Any) -> DataLoader[Any]:
    """Return a copy of a loader with other samplers; a copy keeps a subclass's attributes."""
    same = copy.copy(loader)
    # DataLoader.__setattr__ refuses both, because running workers would not see the change. The
    # copy has no workers yet.
    same.__dict__ |= {"sampler": sampler, "batch_sampler": batch_sampler, "_iterator": None}
    return same
