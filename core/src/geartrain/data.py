"""Loaders and batches: where loaders come from, how long they are, and how a batch gets to the device."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from geartrain.errors import TrainingError, UsageError
from geartrain.module import DataModule, Module, overridden

if TYPE_CHECKING:
    from geartrain.run import Run

#: stage -> the method that gives its loaders.
_METHODS = {"train": "train_dataloader", "validate": "val_dataloader", "test": "test_dataloader", "predict": "predict_dataloader"}


#: What a checkpoint can hold beside tensors, and lists, tuples, sets and dicts of them.
_PLAIN = (bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)


def map_tensors(data: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """``data`` with ``function`` applied to every tensor in it; lists, tuples, named tuples, mappings and dataclasses keep
    their form, anything else stays as it is."""
    if isinstance(data, torch.Tensor):
        return function(data)
    return map_nested(data, lambda item: map_tensors(item, function))


def move(batch: Any, device: torch.device) -> Any:
    """A batch on ``device``; ``non_blocking`` where that is safe, which overlaps copies from pinned memory.

    Tensors and any object with ``.to(device)`` are moved, in any nesting of lists, tuples, named tuples, mappings, dataclasses.
    """
    if isinstance(batch, torch.Tensor):
        # On mps torch would read the batch after this call, when the loader may have freed it: wrong values, no error
        # (pytorch/pytorch#189690). On cuda a copy from pageable memory is staged before the call returns.
        return batch.to(device, non_blocking=device.type != "mps")
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    return map_nested(batch, lambda item: move(item, device))


def map_nested(data: Any, function: Callable[[Any], Any]) -> Any:
    """``data`` with ``function`` applied to each item of a list, tuple, named tuple, mapping or dataclass, one level deep, keeping its
    form; anything else stays as it is."""
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*map(function, data))
    if isinstance(data, list | tuple):
        return type(data)(map(function, data))
    if isinstance(data, Mapping):
        items = {key: function(value) for key, value in data.items()}
        if not isinstance(data, MutableMapping) or type(data) is dict:
            return items
        same = copy.copy(data)  # an OrderedDict or defaultdict stays one
        for key, value in items.items():
            same[key] = value  # one by one: what a model of transformers gives forbids update()
        return same
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return dataclasses.replace(data, **{f.name: function(getattr(data, f.name)) for f in dataclasses.fields(data) if f.init})
    return data


def not_plain(value: Any) -> str | None:
    """The class of the first thing in ``value`` that could not be read again with ``weights_only=True``; ``None`` where there is none:
    tensors, numbers, strings, and lists, tuples, sets and dicts of them."""
    if isinstance(value, torch.Tensor) or value is None or type(value) in _PLAIN:
        return None
    if type(value) in (dict, OrderedDict):
        value = (*value, *value.values())
    elif type(value) not in (list, tuple, set):
        return f"{type(value).__module__}.{type(value).__qualname__}"
    return next((odd for item in value if (odd := not_plain(item)) is not None), None)


class Through:
    """Batches, each through a function: what a wrapper of ``device_batches`` returns.

    Args:
        batches: what the hook's owner returned.
        loader: what it was made from.
    """

    def __init__(self, batches: Iterator[Any], loader: Iterable[Any], function: Callable[[Any], Any]) -> None:
        self._batches, self._loader, self._function = batches, loader, function

    def __iter__(self) -> Through:
        return self

    def __next__(self) -> Any:
        return self._function(next(self._batches))  # in no variable: the batch as it was must not stay on the device beside the new one

    def close(self) -> None:
        close_batches(self._batches, self._loader)


def close_batches(batches: Any, loader: Any) -> None:
    """Let an iterator of ``device_batches`` go: one that prefetches holds batches and streams. A generator of the user's own, which is the
    loader itself, goes on in the next epoch."""
    close = getattr(batches, "close", None)
    if close is not None and batches is not loader:
        close()


def moves_nothing(run: Run) -> bool:
    """Whether a batch can be used as the loader gave it: on the CPU, with no transfer hook of the module's own."""
    hooks = ("transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer")
    return run.device.type == "cpu" and not any(overridden(run.module, name) for name in hooks)


def transfer(run: Run, batch: Any) -> Any:
    """One batch on the device, through the module's own transfer hooks."""
    module, index = run.module, run.dataloader_idx
    batch = module.on_before_batch_transfer(batch, index)
    batch = module.transfer_batch_to_device(batch, run.device, index)
    return module.on_after_batch_transfer(batch, index)


def first_size(batch: Any) -> int | None:
    """The first dimension of the first tensor in a batch that has one: how many samples it has; ``None`` if there is none."""
    if isinstance(batch, torch.Tensor):
        return batch.size(0) if batch.ndim else None
    if batch.__class__ is tuple or batch.__class__ is list:  # before the questions that take longer: this is asked once a step
        for item in batch:
            size = first_size(item)
            if size is not None:
                return size
        return None
    if hasattr(batch, "__array__") and hasattr(batch, "shape"):
        return int(batch.shape[0]) if batch.shape else None
    if isinstance(batch, Mapping):
        batch = batch.values()
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        batch = [getattr(batch, f.name) for f in dataclasses.fields(batch)]
    if isinstance(batch, str | bytes) or not isinstance(batch, Iterable):
        return None
    return next((size for item in batch if (size := first_size(item)) is not None), None)


# --- loaders -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class DataSource:
    """Where a run's loaders come from."""

    #: stage -> what the user passed to ``Trainer``, if anything.
    given: Mapping[str, Any]
    datamodule: DataModule | None = None

    @staticmethod
    def method(stage: str) -> str:
        """The method that makes a stage's loaders."""
        return _METHODS[stage]

    def loaders(self, stage: str, module: Module) -> list[Iterable[Any]]:
        """The loaders of a stage: those given, else the DataModule's, else the module's own; empty where there are none.

        Raises:
            UsageError: what was given cannot be iterated.
        """
        given, method = self.given.get(stage), _METHODS[stage]
        if given is None and self.datamodule is not None and overridden(self.datamodule, method):
            given = getattr(self.datamodule, method)()
        elif given is None and callable(getattr(module, method, None)):
            given = getattr(module, method)()
        if given is None:
            return []
        if isinstance(given, list | tuple) and given and all(map(_is_loader, given)):
            if stage == "train" and len(given) > 1:
                raise UsageError(f"{len(given)} loaders to train on are given, and training takes one. Fix: torch.utils.data.ConcatDataset")
            return list(given)
        if not isinstance(given, Iterable):
            raise UsageError(f"the loader to {stage} is {given!r}, which cannot be iterated. Fix: a DataLoader or an iterable of batches")
        return [given]


def _is_loader(item: Any) -> bool:
    """Whether an item of a list is a loader, and not a batch."""
    return (
        isinstance(item, Iterable) and not isinstance(item, torch.Tensor | list | tuple | Mapping | str) and not hasattr(item, "__array__")
    )


def length(thing: Any) -> int | None:
    """Return the length of a loader or sampler; ``None`` if it cannot say."""
    try:
        return len(thing)
    except TypeError:
        return None


def count_batches(loader: Iterable[Any], limit: int | float | None, stage: str, total: int | None = None) -> int | None:
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
            raise UsageError(f"a fraction ({limit}) of the loader to {stage} cannot be taken: it has no length. Fix: a number of batches")
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
