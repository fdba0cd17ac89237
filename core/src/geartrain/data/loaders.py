"""Loaders and batches: where loaders come from, how long they are, and how a batch gets to the device."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from geartrain.errors import TrainingError, UsageError
from geartrain.module.module import DataModule, Module, overridden

if TYPE_CHECKING:
    from geartrain.loop.run import Run

#: stage -> the method that gives its loaders.
_METHODS = {
    "train": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}


#: The module's methods that a batch goes through on its way to the device.
TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Through:
    """Batches, each through a function, as a wrapper of ``device_batches`` returns them.

    Args:
        batches: the result of the hook's owner.
        loader: their loader.
    """

    def __init__(
        self, batches: Iterator[Any], loader: Iterable[Any], function: Callable[[Any], Any]
    ) -> None:
        self._batches, self._loader, self._function = batches, loader, function

    def __iter__(self) -> Through:
        return self

    def __next__(self) -> Any:
        return self._function(
            next(self._batches)
        )  # in no variable: the batch as it was must not stay on the device beside the new one

    def close(self) -> None:
        close_batches(self._batches, self._loader)


def close_batches(batches: Any, loader: Any) -> None:
    """Close an iterator of ``device_batches``: one that prefetches holds batches and streams, and a DataLoader's has workers, which an
    error's traceback would keep. A user's generator, which is the loader itself, continues in the next epoch, and so do
    persistent workers."""
    close = getattr(batches, "close", None) or getattr(batches, "_shutdown_workers", None)
    if (
        close is not None
        and batches is not loader
        and batches is not getattr(loader, "_iterator", None)
    ):
        close()


def end_workers(loader: Any) -> None:
    """End a loader's persistent workers. The next pass over it starts others.

    Left to the garbage collector, each of them costs 5 s: it finalizes the worker's queue first, and torch waits for an answer.
    """
    iterator = loader._iterator if isinstance(loader, DataLoader) else None
    if iterator is not None:
        loader._iterator = None
        close_batches(iterator, loader)


def moves_nothing(run: Run) -> bool:
    """True if a batch can be used as the loader gave it: on the CPU, without a transfer hook in the module."""
    return run.device.type == "cpu" and not any(
        overridden(run.module, name) for name in TRANSFER_HOOKS
    )


def transfer(run: Run, batch: Any) -> Any:
    """One batch on the device, through the module's own transfer hooks."""
    module, index, was = run.module, run.dataloader_idx, batch
    batch = module.on_before_batch_transfer(batch, index)
    batch = module.transfer_batch_to_device(batch, run.device, index)
    batch = module.on_after_batch_transfer(batch, index)
    if batch is None and was is not None:
        own = [name for name in TRANSFER_HOOKS if overridden(module, name)]
        raise TrainingError(
            f"{type(module).__name__}: {' or '.join(own)} made None of a batch. Fix: return the batch from it"
        )
    return batch


def first_size(batch: Any) -> int | None:
    """The first dimension of the first tensor in a batch that has one; ``None`` if there is none."""
    if isinstance(batch, torch.Tensor):
        return batch.size(0) if batch.ndim else None
    if (
        batch.__class__ is tuple or batch.__class__ is list
    ):  # before the questions that take longer: this is asked once a step
        for item in batch:
            size = first_size(item)
            if size is not None:
                return size
        return None
    return next(_first_dimensions(batch), None)


def _first_dimensions(batch: Any) -> Iterator[int]:
    """The first dimension of each tensor and array in a batch that has one."""
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
    return (
        batch
        if isinstance(batch, Iterable) and not isinstance(batch, str | bytes | Iterator)
        else ()
    )


def _told_size(batch: Any) -> int | None:
    """The number of samples that a batch, or something in it, says itself: a batch of graphs has one row a node, not one a graph."""
    if isinstance(batch, torch.Tensor | str | bytes):
        return None
    for name in ("batch_size", "num_graphs"):
        size = getattr(batch, name, None)
        size = size[0] if isinstance(size, torch.Size) and size else size  # of a TensorDict
        if type(size) is int:
            return size
    return next((size for item in _items(batch) if (size := _told_size(item)) is not None), None)


def _last_size(batch: Any) -> int | None:
    """The first dimension of the last tensor: the labels, beside a list of images."""
    return next(iter([*_first_dimensions(batch)][-1:]), None)


def _outer_size(batch: Any) -> int | None:
    """The length of a batch that is a list of samples."""
    return len(batch) if type(batch) in (list, tuple) else None


def _listed_size(batch: Any) -> int | None:
    """The length of the list that holds the first thing in a batch: a list of images, beside a list of boxes."""
    if type(batch) in (list, tuple) and batch:
        return size if (size := _listed_size(batch[0])) is not None else len(batch)
    return (
        next((size for item in batch.values() if (size := _listed_size(item)) is not None), None)
        if isinstance(batch, Mapping)
        else None
    )


class BatchSizer:
    """Say how many samples each batch of one loader has.

    A batch may say it itself. Otherwise the first one is compared with the loader, if that knows its batch size, to see where in a batch
    the number stands. If it stands nowhere, the loader's own is taken.

    Args:
        loader: what gives the batches.
        warns: whether to warn if there is no certain answer.
    """

    def __init__(self, loader: Any, warns: bool = True) -> None:
        self._loader, self._warns = loader, warns
        #: The number of samples in a batch; ``None`` if there is no telling. The first call puts the rule that it finds here.
        self.size: Callable[[Any], int | None] = self._first

    def _first(self, batch: Any) -> int | None:
        self.size = self._find(batch)
        return self.size(batch)

    def _find(self, batch: Any) -> Callable[[Any], int | None]:
        if _told_size(batch) is not None:
            return _told_size
        size, samples = (
            loader_batch_size(self._loader),
            length(getattr(self._loader, "sampler", None)),
        )
        expected = size if size is None or samples is None else min(size, samples)
        for rule in (first_size, _last_size, _listed_size, _outer_size):
            if expected is not None and rule(batch) == expected:
                return rule
        found = sorted(set(_first_dimensions(batch)))
        if len(found) < 2 and (expected is None or (found and (expected == 1 or samples is None))):
            return first_size  # nothing contradicts it: the loader does not know, or its dataset makes batches itself, or is a short stream
        weight = first_size(batch) if expected is None else expected
        if self._warns:
            warnings.warn(
                f"a batch of {describe(self._loader)} does not say how many samples it has: the first dimensions of its tensors are "
                f"{found}, and the loader's batch size is {size}. Its size is taken to be {weight}. "
                "Fix: self.log(..., batch_size=NUMBER), or let the batch have an attribute batch_size",
                stacklevel=2,
            )
        return first_size if expected is None else lambda _: expected


# --- loaders -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class DataSource:
    """Where a run's loaders come from."""

    #: stage -> the loaders that the user passed to ``Trainer``, if any.
    given: Mapping[str, Any]
    datamodule: DataModule | None = None

    @staticmethod
    def method(stage: str) -> str:
        """The method that makes a stage's loaders."""
        return _METHODS[stage]

    def loaders(self, stage: str, module: Module) -> list[Iterable[Any]]:
        """Return the loaders of a stage: those given, else the DataModule's, else the module's; empty if none exist.

        Raises:
            UsageError: the loaders are neither loaders nor batches.
        """
        given, method = self.given.get(stage), _METHODS[stage]
        owner = (
            self.datamodule
            if self.datamodule is not None and overridden(self.datamodule, method)
            else module
        )
        if given is None and callable(getattr(owner, method, None)):
            given = getattr(owner, method)()
            if given is None and stage == "validate":
                warnings.warn(
                    f"{type(owner).__name__}.{method} returned None, so there is nothing to validate",
                    stacklevel=2,
                )
        return [] if given is None else read_loaders(given, stage)


def read_loaders(given: Any, stage: str) -> list[Iterable[Any]]:
    """Return the loaders in what stands for a stage's data: a loader, batches, or nested lists and dicts of loaders, in their order.

    Raises:
        UsageError: it holds no loaders, or several to train on; or it cannot be iterated.
    """
    found = list(_leaves(given))
    loaders = [item for item in found if _is_loader(item)]
    is_list = isinstance(given, list | tuple)
    if (
        not isinstance(given, Iterable)
        or isinstance(given, str | bytes)
        or hasattr(given, "itertuples")
    ):  # a data frame gives its columns
        raise UsageError(
            f"the loader to {stage} is {_shown(given)}, which is none. Fix: a DataLoader or an iterable of batches"
        )
    if isinstance(given, Mapping) or (
        is_list and any(isinstance(item, DataLoader) for item in found)
    ):
        if not found or len(loaders) < len(found):
            what = (
                ", ".join(
                    dict.fromkeys(type(item).__name__ for item in found if not _is_loader(item))
                )
                or "nothing"
            )
            raise UsageError(
                f"the {type(given).__name__} to {stage} holds {what} in place of loaders. Fix: give loaders alone in it"
            )
    elif not is_list or not found or len(loaders) < len(found):
        return [given]
    if stage == "train" and (len(loaders) > 1 or isinstance(given, Mapping)):
        raise UsageError(
            f"a {type(given).__name__} of {len(loaders)} loaders to train on is given, and training takes one loader. Fix: a DataLoader of "
            "torch.utils.data.ConcatDataset, to train on one after the other, or of StackDataset, whose batches have something of each"
        )
    return loaders


def _shown(thing: Any) -> str:
    text = repr(thing)
    return text if len(text) < 60 else f"a {type(thing).__name__}"


def _leaves(thing: Any) -> Iterator[Any]:
    """What stands in nested lists, tuples and dicts; the thing itself if it is none."""
    if isinstance(thing, Mapping | list | tuple):
        for item in thing.values() if isinstance(thing, Mapping) else thing:
            yield from _leaves(item)
    else:
        yield thing


def _is_loader(item: Any) -> bool:
    """True if an item of a list is a loader, and not a batch, which can be moved or is an array or text."""
    return (
        isinstance(item, Iterable)
        and not isinstance(item, str | bytes)
        and not hasattr(item, "to")
        and not hasattr(item, "__array__")
    )


def length(thing: Any) -> int | None:
    """Return the length of a loader or sampler; ``None`` if it cannot say."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None


def count_batches(
    loader: Iterable[Any], limit: int | float | None, stage: str, total: int | None = None
) -> int | None:
    """Return how many batches of a loader will be used; ``None`` if it cannot say.

    Args:
        total: how many it has; default: its length.

    Raises:
        TrainingError: the loader is empty.
        UsageError: a fraction of a loader that has no length.
    """
    total = length(loader) if total is None else total
    if limit == 0:
        return 0
    if total == 0:
        raise TrainingError(
            f"the loader to {stage} is empty: {describe(loader)}. Fix: give it samples, or a smaller batch_size with drop_last"
        )
    if isinstance(limit, float) and limit < 1.0:
        if total is None:
            raise UsageError(
                f"a fraction ({limit}) of the loader to {stage} cannot be taken: it has no length. Fix: a number of batches"
            )
        if int(total * limit) == 0:
            raise UsageError(
                f"{limit} of the {total} batches to {stage} is less than one batch. Fix: a larger fraction, or a number of batches"
            )
        return int(total * limit)
    if limit is None or isinstance(limit, float):
        return total
    return limit if total is None else min(limit, total)


def describe(loader: Any) -> str:
    dataset = getattr(loader, "dataset", None)
    return type(loader).__name__ + (f" of {type(dataset).__name__}" if dataset is not None else "")


def loader_batch_size(loader: Any) -> int | None:
    """Samples in one batch, as far as the loader says it without being iterated."""
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None
