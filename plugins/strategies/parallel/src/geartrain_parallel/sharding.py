"""Shard data: equally long shards to train, shards with every sample exactly once to evaluate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from geartrain.plugin_api import Stage, drawing_from, length, warn, with_samplers

if TYPE_CHECKING:
    from geartrain import Run


class StridedShard(Sampler[Any]):
    """Every ``size``-th item of another sampler, starting with the item ``rank``.

    Random samplers are seeded, so that all ranks see the same order.

    Args:
        sampler: gives the same items in the same order on every rank.
        rank: this rank, from 0.
        size: the number of ranks.
        even: True if each rank gets equally many items (training): a sampler that is too short
            starts again. Otherwise no item comes twice (evaluation), and ranks differ by one at
            most.
        seed: of the order; the same on every rank.
    """

    def __init__(self, sampler: Any, rank: int, size: int, even: bool, seed: int) -> None:
        self.sampler, self.rank, self.size = sampler, rank, size
        self.even, self.order_seed, self.epoch = even, seed, 0
        #: Epoch -> the items of the sampler, of all ranks together, that are left out in it.
        self.left_out: dict[int, range] = {}

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

    def __len__(self) -> int:
        total = len(self.sampler) - len(self.left_out.get(self.epoch, ()))
        if self.even:
            return math.ceil(total / self.size)
        return len(range(self.rank, total, self.size)) or min(total, 1)

    def __iter__(self) -> Iterator[Any]:
        return _part(self._all(), self.rank, self.size, self.even)

    def _all(self) -> Iterable[Any]:
        if length(self.sampler) is None:
            return self.sampler  # type: ignore[no-any-return]
        seed = self.order_seed + self.epoch
        # A batch sampler draws from the sampler inside it.
        drawn_from: list[Any] = [self.sampler, getattr(self.sampler, "sampler", None)]
        drawn_from = [sampler for sampler in drawn_from if _has_generator(sampler)]
        before = [sampler.generator for sampler in drawn_from]
        with drawing_from(seed):
            try:
                for sampler in drawn_from:
                    sampler.generator = torch.Generator().manual_seed(seed)
                items, gap = list(self.sampler), self.left_out.get(self.epoch, range(0))
                return items[: gap.start] + items[gap.stop :]
            finally:
                for sampler, generator in zip(drawn_from, before, strict=True):
                    sampler.generator = generator


def _has_generator(sampler: Any) -> bool:
    generator = getattr(sampler, "generator", ...)
    return generator is None or isinstance(generator, torch.Generator)


def _part(items: Iterable[Any], rank: int, size: int, even: bool) -> Iterator[Any]:
    """Return every ``size``-th item, starting with the item ``rank``."""
    if not isinstance(items, list):  # no length, perhaps no end
        if not even:
            return islice(items, rank, None, size)
        # In training, drop the items after the last full round.
        return (turn[rank] for turn in zip(*[iter(items)] * size, strict=False))
    if even and items:
        target = math.ceil(len(items) / size) * size
        items = (items * math.ceil(target / len(items)))[:target]
    # A rank without items gets one of another rank, to repeat while others still evaluate.
    return iter(items[rank::size] or items[:1])


def agree_on_seed(run: Run, generators: Sequence[torch.Generator]) -> int:
    """Return the seed of the data's order.

    As in one process it follows from the first of the loader's own generators; without one from the
    plan's seed, or from torch's generator, which the user may have seeded. Rank 0's is used.
    """
    seed, generator = run.plan.options.seed, next(iter(generators), None)
    if generator is not None or seed is None:  # on each rank: their generators stay alike
        seed = int(torch.empty((), dtype=torch.int64).random_(0, 2**32, generator=generator))
    return int(run.hooks.broadcast(run=run, obj=seed, src=0))


def shard(run: Run, loader: Iterable[Any], stage: str) -> Iterable[Any]:
    """Return this rank's part of a loader, for a strategy's ``shard_dataloader``.

    A random or sequential sampler is replaced by one with the loader's shuffling. Another sampler
    of the user is wrapped. A user's ``DistributedSampler`` is kept. A loader that is not a
    DataLoader of a dataset with a length is kept, with a warning.

    To predict, ranks get whole batches of the loader in turn, so that the outputs are those of one
    process.

    Args:
        run: this rank's run.
        loader: the user's loader.
        stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
    """
    rank, size = run.world.data_rank, run.world.data_size
    # A launcher such as torchrun may start more ranks the next time, and the run goes on in the
    # order of this epoch.
    alone = run.world.size == 1 and (run.cluster is None or run.cluster.launcher == "geartrain")
    if alone or not run.plan.options.use_distributed_sampler:
        return loader
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        if size == 1:  # ranks that have one model together
            return loader
        message = type(getattr(loader, "dataset", loader)).__name__
        result = ""
        if stage == "predict":
            result = ". predict returns the outputs of rank 0, then those of rank 1, and so on"
        peers = run.world.size // size
        rank_name = "self.trainer.global_rank" + (f" // {peers}" if peers > 1 else "")
        warn(
            f"{message} cannot be sharded: every rank sees all of it, unless it shards itself by "
            f"{rank_name}{result}"
        )
        return loader
    batches = loader.batch_sampler
    if any(isinstance(sampler, DistributedSampler) for sampler in Stage([loader]).samplers()):
        return loader
    even, seed = stage == "train", agree_on_seed(run, list(Stage([loader]).generators()))
    if batches is None:
        return with_samplers(loader, StridedShard(loader.sampler, rank, size, even, seed), None)
    if type(batches) is BatchSampler and stage != "predict":
        sampler = StridedShard(batches.sampler, rank, size, even, seed)
        return with_samplers(
            loader, sampler, BatchSampler(sampler, batches.batch_size, batches.drop_last)
        )
    return with_samplers(loader, loader.sampler, StridedShard(batches, rank, size, even, seed))
