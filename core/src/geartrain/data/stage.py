"""The loaders of one stage of a run: their lengths, samplers, and this rank's part of each."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from geartrain.data.indices import IndexedBatches
from geartrain.data.loaders import count_batches, length, share_temporary_folder, single_loaders


@dataclass(slots=True)
class Stage:
    """The loaders of one stage, and for each the number of batches that are used."""

    #: After ``shard_dataloader``.
    loaders: list[Any] = field(default_factory=list)
    #: Batches of one pass on this rank, after limits; ``None`` if a loader has no length.
    batches: list[int | None] = field(default_factory=list)
    #: The most batches that any rank has: in evaluation every rank calls the step so often.
    max_batches: list[int | None] = field(default_factory=list)
    #: True if a rank's loader has no length: ranks must agree at each batch whether another
    #: follows.
    lengths_unknown: bool = False
    #: Batches that the first loader, which resumes itself, leaves out of its next pass.
    done: int = 0

    @classmethod
    def of(cls, loaders: list[Iterable[Any]], name: str, limit: int | float | None = None) -> Stage:
        """Return the stage of loaders that are this rank's, with the batches of each to use.

        Args:
            loaders: after ``shard_dataloader``.
            name: as in :attr:`geartrain.Run.stage`.
            limit: the largest number of batches, or a fraction of them; ``None`` for all. To
                predict, it is for all ranks together.

        Raises:
            TrainingError: a loader is empty.
            UsageError: a fraction of a loader that has no length.
        """
        share_temporary_folder(loaders)
        counts = [_batches(loader, limit, name) for loader in loaders]
        return cls(loaders, counts, counts)

    @staticmethod
    def in_turn(loader: Any) -> Any:
        """Return the sampler that gives ranks whole evaluation batches in turn, if there is one."""
        batches = _batch_sampler(loader)
        sampler: Any = getattr(loader, "sampler", None) if batches is None else batches
        return sampler if hasattr(sampler, "order_seed") and not sampler.even else None

    def __reduce__(self) -> tuple[Any, ...]:
        # Loaders stay in their process.
        return Stage, ([], self.batches, self.max_batches, self.lengths_unknown)

    def single_loaders(self) -> list[Any]:
        """Return the loaders, and those in each that has several, as a CombinedLoader."""
        return list(chain.from_iterable(map(single_loaders, self.loaders)))

    def samplers(self) -> list[Any]:
        """Return the loaders' samplers, their batch samplers and the samplers in those."""
        return list(chain.from_iterable(map(_samplers, self.loaders)))

    def generators(self) -> Iterator[torch.Generator]:
        """Yield the generators from which the loaders draw their order."""
        for loader in self.loaders:
            for thing in (*single_loaders(loader), *_samplers(loader)):
                if isinstance(generator := getattr(thing, "generator", None), torch.Generator):
                    yield generator

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the samplers, and so the order."""
        for sampler in self.samplers():
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    @property
    def first(self) -> int:
        """The batch at which passes over the first loader begin; set it to leave out those before.

        It stays 0 for a loader that must read all batches to repeat them. So it does if ranks have
        to agree at each batch: all of them must read equally many.
        """
        batches = getattr(self.loaders[0], "batch_sampler", None)
        return batches.first if isinstance(batches, IndexedBatches) else self.done

    @first.setter
    def first(self, position: int) -> None:
        batches, self.done = getattr(self.loaders[0], "batch_sampler", None), 0
        if isinstance(batches, IndexedBatches) and not self.lengths_unknown:
            batches.first = position

    def seeds(self) -> list[list[int]]:
        """Return the seeds of the order of each loader that is sharded."""
        return [[shard.order_seed for shard in _shards(loader)] for loader in self.loaders]

    def set_seeds(self, seeds: list[list[int]]) -> None:
        """Give sharded loaders the order of others; change none that is or was not sharded."""
        for loader, numbers in zip(self.loaders, seeds, strict=False):
            for shard, number in zip(_shards(loader), numbers, strict=False):
                shard.order_seed = number


def _batch_sampler(loader: Any) -> Any:
    """Return a loader's batch sampler, as it was made; ``None`` if it has none."""
    batches = getattr(loader, "batch_sampler", None)
    return batches.batches if isinstance(batches, IndexedBatches) else batches


def _samplers(loader: Any) -> list[Any]:
    """Return a loader's sampler, its batch sampler and the sampler in that, each once."""
    found: list[Any] = []
    for part in single_loaders(loader):
        batches = _batch_sampler(part)
        found += getattr(part, "sampler", None), batches, getattr(batches, "sampler", None)
    return list({id(sampler): sampler for sampler in found if sampler is not None}.values())


def _shards(loader: Any) -> list[Any]:
    """Return the samplers that give this rank its part: ``StridedShard`` of geartrain-parallel."""
    return [sampler for sampler in _samplers(loader) if hasattr(sampler, "order_seed")]


def _batches(loader: Any, limit: int | float | None, stage: str) -> int | None:
    """Return the batches of this rank's loader that are used."""
    in_turn = Stage.in_turn(loader) if stage == "predict" else None
    if in_turn is not None:
        total = count_batches(loader, limit, stage, length(in_turn.sampler))
        return None if total is None else len(range(in_turn.rank, total, in_turn.size))
    # A rank whose part of an evaluation is empty repeats a sample of another.
    is_empty = any(not shard.even and shard.empty for shard in _shards(loader))
    return 0 if is_empty else count_batches(loader, limit, stage)


def with_samplers(loader: DataLoader[Any], sampler: Any, batch_sampler: Any) -> DataLoader[Any]:
    """Return a copy of a loader with other samplers; a copy keeps a subclass's attributes."""
    same = copy.copy(loader)
    # DataLoader.__setattr__ refuses both, because running workers would not see the change. The
    # copy has no workers yet.
    same.__dict__ |= {"sampler": sampler, "batch_sampler": batch_sampler, "_iterator": None}
    return same


def with_indexed_batches(loader: Any, resumes: bool) -> Any:
    """Return a copy of a DataLoader with :class:`IndexedBatches`, if it has workers or ``resumes``.

    Any other is returned as it is. So are streams, loaders without batches, and those of a dataset
    with a generator of its own: their samples depend on those that were read before.
    """
    iterates = getattr(getattr(type(loader), "__iter__", None), "__module__", "")
    plain = isinstance(loader, DataLoader) and iterates.startswith(("torch.utils.", "torchdata."))
    if not plain or loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
        return loader
    if not (resumes or loader.num_workers) or has_generator(loader.dataset):
        return loader
    return with_samplers(loader, loader.sampler, IndexedBatches(loader))


def has_generator(dataset: Any) -> bool:
    """True if a dataset, or one inside it, has an attribute that is a random generator."""
    values = getattr(dataset, "__dict__", {})
    return ("dataset" in values and has_generator(values["dataset"])) or any(
        isinstance(value, torch.Generator | random.Random)
        or type(value).__module__.startswith("numpy.random")
        for value in values.values()
    )
