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
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from geartrain.data.loaders import length

if TYPE_CHECKING:
    from geartrain.loop.run import Run


class Shard(Sampler[Any]):
    """This rank's items of another sampler: every ``size``-th, from ``rank``.

    Args:
        sampler: gives the same items in the same order on every rank; random ones are seeded for it.
        even: True if each rank gets equally many items, by starting over at the end (training). Otherwise no item comes twice
            (evaluation), and ranks differ by one at most.
        seed: of the order; the same on every rank.
    """

    def __init__(self, sampler: Any, rank: int, size: int, even: bool, seed: int) -> None:
        self.sampler, self.rank, self.size, self.even, self.seed, self.epoch = sampler, rank, size, even, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Another order in each epoch, the same on every rank."""
        self.epoch = epoch
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    @property
    def empty(self) -> bool:
        """True if this rank has no item and another rank has one."""
        total = length(self.sampler)
        return total is not None and 0 < total <= self.rank

    def __len__(self) -> int:
        total = len(self.sampler)
        return math.ceil(total / self.size) if self.even else len(range(self.rank, total, self.size)) or min(total, 1)

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
    if not isinstance(items, list):  # no length, perhaps no end: what is left after the last full round is dropped in training
        return (turn[rank] for turn in zip(*[iter(items)] * size, strict=False)) if even else islice(items, rank, None, size)
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
        result = ". What predict returns has the outputs of rank 0, then those of rank 1, and so on" if stage == "predict" else ""
        warnings.warn(
            f"{what} cannot be sharded: every rank sees all of it, unless it shards itself by self.trainer.global_rank{result}",
            stacklevel=2,
        )
        return loader
    batches = loader.batch_sampler
    if any(isinstance(sampler, DistributedSampler) for sampler in _samplers(loader)):
        return loader
    even, seed = stage == "train", agree_on_seed(run)
    if batches is None:
        return _with(loader, Shard(loader.sampler, rank, size, even, seed), None)
    if type(batches) is BatchSampler and stage != "predict":
        sampler = Shard(batches.sampler, rank, size, even, seed)
        return _with(loader, sampler, BatchSampler(sampler, batches.batch_size, batches.drop_last))
    return _with(loader, loader.sampler, Shard(batches, rank, size, even, seed))


def has_no_own_samples(loader: Any) -> bool:
    """True if a rank has no sample of its own in an evaluation loader, which then holds one of another rank."""
    return any(isinstance(sampler, Shard) and not sampler.even and sampler.empty for sampler in _samplers(loader))


def batches_in_turn(loader: Any) -> Shard | None:
    """Return what gives ranks whole batches of an evaluation loader in turn; ``None`` if the ranks' batches are not such parts of it."""
    batches = getattr(loader, "batch_sampler", None)
    dealer = getattr(loader, "sampler", None) if batches is None else batches
    return dealer if isinstance(dealer, Shard) and not dealer.even else None


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader's samplers which epoch begins."""
    for sampler in _samplers(loader):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def order_seeds(loader: Any) -> list[int]:
    """The seeds of a sharded loader's order."""
    return [sampler.seed for sampler in _samplers(loader) if isinstance(sampler, Shard)]


def set_order_seeds(loader: Any, seeds: list[int]) -> None:
    """Give a sharded loader the order that another had; nothing to one that is not sharded, or was not."""
    shards = [sampler for sampler in _samplers(loader) if isinstance(sampler, Shard)]
    for sampler, seed in zip(shards, seeds, strict=False):
        sampler.seed = seed


def generators(loader: Any) -> Iterator[torch.Generator]:
    """The generators of its own that a loader draws its order from."""
    for thing in (loader, *_samplers(loader)):
        generator = getattr(thing, "generator", None)
        if isinstance(generator, torch.Generator):
            yield generator


def _samplers(loader: Any) -> list[Any]:
    """A loader's sampler, its batch sampler and the sampler in that, each once."""
    batches = getattr(loader, "batch_sampler", None)
    found = (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    return list({id(sampler): sampler for sampler in found if sampler is not None}.values())


def _with(loader: DataLoader[Any], sampler: Any, batch_sampler: Any) -> DataLoader[Any]:
    """The same loader with other samplers: a copy, so that a subclass keeps whatever it has, and need not be made again."""
    same = copy.copy(loader)
    # Past DataLoader.__setattr__, which refuses both: a loader whose workers run already would not hear of it. These are new.
    same.__dict__ |= {"sampler": sampler, "batch_sampler": batch_sampler, "_iterator": None}
    return same
