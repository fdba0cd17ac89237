"""Random numbers of a dataset that do not depend on the number of loader workers.

With workers, geartrain seeds each batch from the run's random state and the batch's position.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from zlib import crc32

import torch
from torch.utils.data import DataLoader, IterableDataset

from geartrain.plugin_api import drawing_from, with_samplers


def seeded(loader: Any) -> Any:
    """Return a loader without workers whose batches have the random numbers that workers draw.

    Any other loader is returned as it is.
    """
    plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    if not plain or loader.num_workers or isinstance(loader.dataset, IterableDataset):
        return loader
    if loader.batch_sampler is None:
        return loader
    return with_samplers(loader, loader.sampler, _SeededBatches(loader))


class _SeededBatches:
    """A loader's batch sampler, whose indices seed the generators while they are read."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._batches: Any = loader.batch_sampler
        self._generator = loader.generator

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        generator = self._generator
        state = torch.get_rng_state() if generator is None else generator.get_state()
        seed = crc32(bytes(state.tolist()))  # as geartrain seeds workers
        for position, indices in enumerate(self._batches):
            yield _SeededIndices(indices, (seed + position) % 2**32)


class _SeededIndices(list[Any]):
    def __init__(self, indices: Any, seed: int) -> None:
        super().__init__(indices)
        self._seed = seed

    def __iter__(self) -> Iterator[Any]:
        with drawing_from(self._seed):
            yield from super().__iter__()
