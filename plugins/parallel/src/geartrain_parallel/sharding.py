"""Each rank's part of the data: training shards of equal length, evaluation shards that hold every sample exactly once."""

from __future__ import annotations

import copy
import math
import random
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from geartrain.plugin_api import Shard, length, samplers

if TYPE_CHECKING:
    from geartrain import Run


class StridedShard(Shard):
    """Every ``size``-th item of another sampler, from ``rank``; random samplers are seeded, so that ranks see the same order.

    ``even`` ranks get equally many items by starting over at the end.
    """

    def __len__(self) -> int:
        total = len(self.sampler)
        return (
            math.ceil(total / self.size)
            if self.even
            else len(range(self.rank, total, self.size)) or min(total, 1)
        )

    def __iter__(self) -> Iterator[Any]:
        return _part(self._all(), self.rank, self.size, self.even)

    def _all(self) -> Iterable[Any]:
        if length(self.sampler) is None:
            return self.sampler  # type: ignore[no-any-return]
        seed = self.seed + self.epoch
        # A batch sampler draws from the sampler inside it.
        drawn_from: list[Any] = [self.sampler, getattr(self.sampler, "sampler", None)]
        drawn_from = [sampler for sampler in drawn_from if _has_generator(sampler)]
        before = [sampler.generator for sampler in drawn_from]
        with _drawing_from(seed):
            try:
                for sampler in drawn_from:
                    sampler.generator = torch.Generator().manual_seed(seed)
                return list(self.sampler)
            finally:
                for sampler, generator in zip(drawn_from, before, strict=True):
                    sampler.generator = generator


def _has_generator(sampler: Any) -> bool:
    generator = getattr(sampler, "generator", ...)
    return generator is None or isinstance(generator, torch.Generator)


def _part(items: Iterable[Any], rank: int, size: int, even: bool) -> Iterator[Any]:
    """Every ``size``-th item, from ``rank``."""
    if not isinstance(
        items, list
    ):  # no length, perhaps no end: in training the rest after the last full round is dropped
        return (
            (turn[rank] for turn in zip(*[iter(items)] * size, strict=False))
            if even
            else islice(items, rank, None, size)
        )
    if even and items:
        target = math.ceil(len(items) / size) * size
        items = (items * math.ceil(target / len(items)))[:target]
    # A rank without any gets one that is not its own: it repeats a batch where others still evaluate.
    return iter(items[rank::size] or items[:1])


@contextmanager
def _drawing_from(seed: int) -> Iterator[None]:
    """Let a sampler that draws from the global generators draw the same on every rank, and put them back as they were."""
    numpy = sys.modules.get("numpy.random")
    python, arrays = random.getstate(), None if numpy is None else numpy.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which seeds devices too
        random.seed(seed)
        if numpy is not None:
            numpy.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.set_state(arrays)


def agree_on_seed(run: Run) -> int:
    """The seed of the data's order: the plan's, else one that rank 0 draws."""
    seed = run.plan.options.seed
    drawn = random.SystemRandom().randrange(2**32) if seed is None else seed
    return int(run.hooks.broadcast(run=run, obj=drawn, src=0))


def shard(run: Run, loader: Iterable[Any], stage: str) -> Iterable[Any]:
    """This rank's part of a loader, for a strategy's ``shard_dataloader``.

    A random or sequential sampler is replaced, keeping the loader's own shuffling. A sampler of the user is wrapped. A
    ``DistributedSampler`` of the user is kept, and so is anything that is not a DataLoader of a dataset with a length.

    To predict, ranks get whole batches of the loader in turn: one output a batch is then the same as in one process.
    """
    rank, size = run.world.rank, run.world.size
    if size == 1 or not run.plan.options.use_distributed_sampler:
        return loader
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        what = type(getattr(loader, "dataset", loader)).__name__
        result = (
            ". What predict returns has the outputs of rank 0, then those of rank 1, and so on"
            if stage == "predict"
            else ""
        )
        warnings.warn(
            f"{what} cannot be sharded: every rank sees all of it, unless it shards itself by self.trainer.global_rank{result}",
            stacklevel=2,
        )
        return loader
    batches = loader.batch_sampler
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers(loader)):
        return loader
    even, seed = stage == "train", agree_on_seed(run)
    if batches is None:
        return _with(loader, StridedShard(loader.sampler, rank, size, even, seed), None)
    if type(batches) is BatchSampler and stage != "predict":
        sampler = StridedShard(batches.sampler, rank, size, even, seed)
        return _with(loader, sampler, BatchSampler(sampler, batches.batch_size, batches.drop_last))
    return _with(loader, loader.sampler, StridedShard(batches, rank, size, even, seed))


def _with(loader: DataLoader[Any], sampler: Any, batch_sampler: Any) -> DataLoader[Any]:
    """The same loader with other samplers: a copy, so that a subclass keeps whatever it has, and need not be made again."""
    same = copy.copy(loader)
    # Past DataLoader.__setattr__, which refuses both: a loader whose workers run already would not hear of it. These are new.
    same.__dict__ |= {"sampler": sampler, "batch_sampler": batch_sampler, "_iterator": None}
    return same
