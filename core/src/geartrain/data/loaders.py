"""Loaders and batches: their length, their sizes, and the transfer of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing import util
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from geartrain.errors import TrainingError, UsageError, warn
from geartrain.module.module import overridden

if TYPE_CHECKING:
    from geartrain.loop.run import Run

#: The module's methods that a batch goes through on its way to the device.
TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class MappedBatches:
    """Batches to which a function is applied, for a wrapper of the hook ``device_batches``.

    Args:
        batches: the result of the hook's owner.
        loader: their loader.
        function: called with each batch; returns the new batch.
    """

    def __init__(
        self, batches: Iterator[Any], loader: Iterable[Any], function: Callable[[Any], Any]
    ) -> None:
        self._batches, self._loader, self._function = batches, loader, function

    def __iter__(self) -> MappedBatches:
        return self

    def __next__(self) -> Any:
        # No variable: it would keep the old batch on the device beside the new one.
        return self._function(next(self._batches))

    def close(self) -> None:
        """Close the iterator of the hook's owner."""
        close_batches(self._batches, self._loader)


def close_batches(batches: Any, loader: Any) -> None:
    """Close an iterator of ``device_batches``, whose batches or workers a traceback would keep.

    A generator that is the loader itself stays open for the next epoch; so do persistent workers.
    """
    close = getattr(batches, "close", None) or getattr(batches, "_shutdown_workers", None)
    stays = batches is loader or batches is getattr(loader, "_iterator", None)
    if close is not None and not stays:
        close()


def end_workers(loader: Any) -> None:
    """End a loader's persistent workers. The next pass over it starts others.

    The garbage collector would need 5 s for each: it finalizes the worker's queue first, and torch
    waits for an answer.
    """
    iterator = loader._iterator if isinstance(loader, DataLoader) else None
    if iterator is not None:
        loader._iterator = None
        close_batches(iterator, loader)


def moves_nothing(run: Run) -> bool:
    """True if a batch needs no transfer: on the CPU, without a transfer hook in the module."""
    has_own = any(overridden(run.module, name) for name in TRANSFER_HOOKS)
    return run.device.type == "cpu" and not has_own


def transfer(run: Run, batch: Any) -> Any:
    """Return a batch on the device, moved by the module's transfer hooks.

    Raises:
        TrainingError: a hook returned ``None``.
    """
    module, index, was = run.module, run.dataloader_idx, batch
    batch = module.on_before_batch_transfer(batch, index)
    batch = module.transfer_batch_to_device(batch, run.device, index)
    batch = module.on_after_batch_transfer(batch, index)
    if batch is None and was is not None:
        hooks = " or ".join(name for name in TRANSFER_HOOKS if overridden(module, name))
        message = f"{type(module).__name__}: {hooks} made None of a batch"
        raise TrainingError(f"{message}. Fix: return the batch from it")
    return batch


def first_size(batch: Any) -> int | None:
    """Return the first dimension of the first tensor that has one, or ``None``."""
    if isinstance(batch, torch.Tensor):
        return batch.size(0) if batch.ndim else None
    if batch.__class__ is tuple or batch.__class__ is list:  # first: this runs in every step
        for item in batch:
            size = first_size(item)
            if size is not None:
                return size
        return None
    return next(_first_dimensions(batch), None)


def _first_dimensions(batch: Any) -> Iterator[int]:
    """Yield the first dimension of each tensor and array in a batch that has one."""
    if isinstance(batch, torch.Tensor) or (hasattr(batch, "__array__") and hasattr(batch, "shape")):
        if batch.shape:
            yield int(batch.shape[0])
    else:
        for item in _items(batch):
            yield from _first_dimensions(item)


def _items(batch: Any) -> Iterable[Any]:
    """Return the items of a batch, one level deep."""
    if isinstance(batch, Mapping):
        return batch.values()
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, f.name) for f in dataclasses.fields(batch)]
    is_nested = isinstance(batch, Iterable) and not isinstance(batch, str | bytes | Iterator)
    return batch if is_nested else ()


def _own_size(batch: Any) -> int | None:
    """Return ``batch_size`` or ``num_graphs`` of a batch or of its first item that has one.

    A batch of graphs has one row a node, not one a graph.
    """
    if isinstance(batch, torch.Tensor | str | bytes):
        return None
    for name in ("batch_size", "num_graphs"):
        size = getattr(batch, name, None)
        size = size[0] if isinstance(size, torch.Size) and size else size  # of a TensorDict
        if type(size) is int:
            return size
    return next((size for item in _items(batch) if (size := _own_size(item)) is not None), None)


def _last_size(batch: Any) -> int | None:
    """Return the first dimension of the last tensor: the labels, beside a list of images."""
    return next(iter([*_first_dimensions(batch)][-1:]), None)


def _outer_size(batch: Any) -> int | None:
    """Return the length of a batch that is a list of samples."""
    return len(batch) if type(batch) in (list, tuple) else None


def _listed_size(batch: Any) -> int | None:
    """Return the length of the innermost first list: the images, beside a list of boxes."""
    if type(batch) in (list, tuple) and batch:
        return size if (size := _listed_size(batch[0])) is not None else len(batch)
    values = batch.values() if isinstance(batch, Mapping) else ()
    return next((size for item in values if (size := _listed_size(item)) is not None), None)


class BatchSizer:
    """Finds how many samples each batch of one loader has.

    A batch may have the number as an attribute. Otherwise the first batch is compared with the
    loader's batch size, to find a dimension that is equal to it. If none is, every batch counts as
    the loader's batch size.

    Args:
        loader: the source of the batches, or ``None``.
        warns: True to warn if the answer is not certain.
    """

    def __init__(self, loader: Any, warns: bool = True) -> None:
        self._loader, self._warns = loader, warns
        #: Samples in one batch if the loader has the number; else ``None``.
        self.loader_batch_size = loader_batch_size(loader)
        #: Returns the samples in a batch, or ``None``. The first call replaces it by a rule.
        self.size: Callable[[Any], int | None] = self._first

    def _first(self, batch: Any) -> int | None:
        self.size = self._find(batch)
        return self.size(batch)

    def _find(self, batch: Any) -> Callable[[Any], int | None]:
        if _own_size(batch) is not None:
            return _own_size
        size = self.loader_batch_size
        samples = length(getattr(self._loader, "sampler", None))
        expected = size if size is None or samples is None else min(size, samples)
        remainder = samples % size if size and samples else None  # a run may resume with that batch
        rules = (first_size, _last_size, _listed_size, _outer_size)
        for wanted in (expected, remainder):
            for rule in rules:
                if wanted and rule(batch) == wanted:
                    return rule
        found = sorted(set(_first_dimensions(batch)))
        if len(found) < 2 and (expected is None or (found and (expected == 1 or samples is None))):
            # Nothing contradicts it: the loader has no batch size, its dataset makes batches, or it
            # is a short stream.
            return first_size
        weight = first_size(batch) if expected is None else expected
        if self._warns:
            message = f"a batch of {describe(self._loader)} does not say how many samples it has: "
            message += f"the first dimensions of its tensors are {found}, and the loader's batch "
            message += f"size is {size}. Its size is taken to be {weight}"
            hint = "self.log(..., batch_size=NUMBER), or let the batch have an attribute batch_size"
            warn(f"{message}. Fix: {hint}")
        return first_size if expected is None else lambda _: expected


def is_loader(item: Any) -> bool:
    """True if an item of a list is a loader. A batch can be moved, or is an array or text."""
    is_batch = hasattr(item, "to") or hasattr(item, "__array__") or isinstance(item, str | bytes)
    return isinstance(item, Iterable) and not is_batch


def single_loaders(loader: Any) -> list[Any]:
    """Return the loaders in one that has ``each_loader``, as CombinedLoader; of others, itself."""
    return loader.loaders if hasattr(loader, "each_loader") else [loader]


def each_loader(loader: Any, function: Callable[[Any], Iterable[Any]]) -> Any:
    """Apply a function that returns a loader to each of :func:`single_loaders`."""
    return loader.each_loader(function) if hasattr(loader, "each_loader") else function(loader)


def share_temporary_folder(loaders: Iterable[Any]) -> None:
    """Make multiprocessing's folder ``pymp-*`` for its sockets, if one of the loaders has workers.

    Otherwise each worker makes its own when it first sends a tensor. After an error nothing removes
    that: multiprocessing ends workers by SIGTERM, for which torch has a handler.
    """
    if any(getattr(loader, "num_workers", 0) for loader in loaders):
        util.get_temp_dir()


def length(thing: Any) -> int | None:
    """Return the length of a loader or sampler, ``None`` if it has none."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None


def count_batches(
    loader: Iterable[Any], limit: int | float | None, stage: str, total: int | None = None
) -> int | None:
    """Return how many batches of a loader will be used; ``None`` if it has no length.

    Args:
        limit: the largest number of batches, or a fraction of them; ``None`` for all.
        stage: its name, for errors.
        total: the batches that it has; default: its length.

    Raises:
        TrainingError: the loader is empty.
        UsageError: a fraction of a loader that has no length.
    """
    total = length(loader) if total is None else total
    if limit == 0:
        return 0
    if total == 0:
        hint = "give it samples, or a smaller batch_size with drop_last"
        raise TrainingError(f"the {stage} loader is empty: {describe(loader)}. Fix: {hint}")
    if isinstance(limit, float) and limit < 1.0:
        if total is None:
            message = f"a fraction ({limit}) of the {stage} loader cannot be taken"
            raise UsageError(f"{message}: it has no length. Fix: use a number of batches")
        if int(total * limit) == 0:
            message = f"{limit} of the {total} batches to {stage} is less than one batch"
            raise UsageError(f"{message}. Fix: use a larger fraction, or a number of batches")
        return int(total * limit)
    if limit is None or isinstance(limit, float):
        return total
    return limit if total is None else min(limit, total)


def describe(loader: Any) -> str:
    """Return the class of a loader and of its dataset, for messages."""
    dataset = getattr(loader, "dataset", None)
    return type(loader).__name__ + (f" of {type(dataset).__name__}" if dataset is not None else "")


def loader_batch_size(loader: Any) -> int | None:
    """Return the samples in one batch if the loader has the number, without iterating it."""
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None
