"""Batches by index: a fit resumes without reading those before, exactly also in workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from zlib import crc32

import torch
from torch.utils.data import DataLoader

from geartrain.data.seeding import seed_cpu, seed_everything


class IndexedBatches:
    """A DataLoader's batch sampler that can begin at a later batch, and gives each batch a seed.

    A worker seeds its generators before it reads a batch. So the batch is the same in any worker,
    and however many batches were left out. Without workers a dataset draws from the generators of
    the training process, whose state is in a checkpoint.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.batches: Any = loader.batch_sampler
        self._has_workers, self._generator = loader.num_workers > 0, loader.generator
        self.batch_size = getattr(loader.batch_sampler, "batch_size", None)
        #: The position at which passes begin.
        self.first = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return self._from_first(iter(self.batches))  # at once: it may draw numbers, as torchdata's

    def _from_first(self, batches: Iterator[Any]) -> Iterator[Any]:
        first, generator = self.first, self._generator
        state = torch.get_rng_state() if generator is None else generator.get_state()
        seed = crc32(bytes(state.tolist())) if self._has_workers else 0
        for position, indices in enumerate(batches):
            if position >= first:
                yield _Seeded(indices, seed + position) if self._has_workers else indices


class _Seeded:
    """The indices of a batch on their way to a worker, which unpickles them and then reads."""

    def __init__(self, indices: Any, seed: int) -> None:
        self._indices, self._seed = indices, seed

    def __reduce__(self) -> tuple[Any, ...]:
        return _seed_worker, (self._indices, self._seed)


def _seed_worker(indices: Any, seed: int) -> Any:
    has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    (seed_everything if has_cuda else seed_cpu)(seed % 2**32)
    return indices
