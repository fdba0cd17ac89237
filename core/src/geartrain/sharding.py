"""Each rank's part of the data: training shards of equal length, evaluation shards that hold every sample exactly once."""

from __future__ import annotations

import inspect
import math
import random
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from geartrain.errors import UsageError

if TYPE_CHECKING:
    from geartrain.run import Run


class ShardSampler(Sampler[int]):
    """This rank's indices of another sampler: every ``size``-th, from ``rank``.

    Args:
        sampler: gives the same indices in the same order on every rank; random ones are seeded for it.
        even: whether each rank gets equally many, by starting over at the end (training); else no index stands twice
            (evaluation), and ranks differ by one at most.
        seed: for a sampler with a generator; the same on every rank.
    """

    def __init__(self, sampler: Any, rank: int, size: int, even: bool, seed: int) -> None:
        self.sampler, self.rank, self.size, self.even, self.seed, self.epoch = sampler, rank, size, even, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Another order in each epoch, the same on every rank."""
        self.epoch = epoch
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        indices = self._all()
        if self.even and indices:
            target = math.ceil(len(indices) / self.size) * self.size
            indices = (indices * math.ceil(target / len(indices)))[:target]
        # A rank without any gets one that is not its own: it repeats a batch where others still evaluate.
        return iter(indices[self.rank :: self.size] or indices[:1])

    @property
    def empty(self) -> bool:
        """Whether this rank has no sample of its own."""
        return self.rank >= len(self.sampler)

    def _all(self) -> list[int]:
        if not hasattr(self.sampler, "generator"):
            return list(self.sampler)
        before = self.sampler.generator
        self.sampler.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        try:
            return list(self.sampler)
        finally:
            self.sampler.generator = before

    def __len__(self) -> int:
        total = len(self.sampler)
        return math.ceil(total / self.size) if self.even else len(range(self.rank, total, self.size)) or min(total, 1)


class ShardBatchSampler(Sampler[list[int]]):
    """This rank's batches of a batch sampler of the user's own: every ``size``-th; in training each rank gets equally many."""

    def __init__(self, sampler: Any, rank: int, size: int, even: bool) -> None:
        self.sampler, self.rank, self.size, self.even = sampler, rank, size, even

    def set_epoch(self, epoch: int) -> None:
        """Passed on to the user's sampler, which must give every rank the same order."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(self.sampler)
        if self.even and batches:
            target = math.ceil(len(batches) / self.size) * self.size
            batches = (batches * math.ceil(target / len(batches)))[:target]
        return iter(batches[self.rank :: self.size] or batches[:1])

    @property
    def empty(self) -> bool:
        """Whether this rank has no batch of its own."""
        return self.rank >= len(self.sampler)

    def __len__(self) -> int:
        total = len(self.sampler)
        return math.ceil(total / self.size) if self.even else len(range(self.rank, total, self.size)) or min(total, 1)


def agree_on_seed(run: Run) -> int:
    """The seed of the data's order: the plan's, else one that rank 0 draws."""
    seed = run.plan.options.seed
    drawn = random.SystemRandom().randrange(2**32) if seed is None else seed
    return int(run.hooks.broadcast(run=run, obj=drawn, src=0))


def shard(run: Run, loader: Iterable[Any], stage: str) -> Iterable[Any]:
    """This rank's part of a loader, for a strategy's ``shard_dataloader``.

    A random or sequential sampler is replaced, keeping the loader's own shuffling; a sampler of the user's own is wrapped; a
    ``DistributedSampler`` of the user's own is kept, and so is anything that is no DataLoader of a dataset with a length.
    """
    rank, size = run.world.rank, run.world.size
    if size == 1 or not run.plan.options.use_distributed_sampler:
        return loader
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        what = type(getattr(loader, "dataset", loader)).__name__
        warnings.warn(
            f"{what} cannot be sharded: every rank sees all of it, unless it shards itself by self.trainer.global_rank", stacklevel=2
        )
        return loader
    if isinstance(loader.sampler, DistributedSampler):
        return loader
    even, seed = stage == "train", agree_on_seed(run)
    if loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler:
        sampler = ShardSampler(loader.sampler, rank, size, even, seed)
        return _remade(loader, sampler=sampler, shuffle=None)
    return _remade(loader, batch_sampler=ShardBatchSampler(loader.batch_sampler, rank, size, even))


def is_spare(loader: Any) -> bool:
    """Whether a rank has no sample of its own in an evaluation loader, which then holds one of another rank's."""
    samplers = (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    return any(isinstance(s, ShardSampler | ShardBatchSampler) and not s.even and s.empty for s in samplers)


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader's samplers which epoch begins."""
    for sampler in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        if sampler is not None and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def _remade(loader: DataLoader[Any], **changed: Any) -> DataLoader[Any]:
    """The same loader with another sampler.

    Raises:
        UsageError: a subclass whose ``__init__`` does not take what DataLoader's does.
    """
    kept = {
        name: getattr(loader, name)
        for name in inspect.signature(DataLoader.__init__).parameters
        if hasattr(loader, name) and name not in ("self", "sampler", "batch_sampler", "shuffle", "batch_size", "drop_last")
    }
    if "batch_sampler" not in changed:
        kept |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if not loader.num_workers:
        kept.pop("prefetch_factor", None)
    try:
        return type(loader)(**kept, **{name: value for name, value in changed.items() if value is not None})
    except TypeError as error:
        raise UsageError(
            f"{type(loader).__name__} cannot be made again with a shard's sampler: {error}. "
            "Fix: give it a DistributedSampler and pass use_distributed_sampler=False"
        ) from error
