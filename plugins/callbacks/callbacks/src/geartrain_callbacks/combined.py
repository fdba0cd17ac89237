"""Several loaders whose batches come together, as one loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from geartrain import TrainingError, UsageError
from geartrain.plugin_api import Stage, close_batches, drawing_from, length, nearest

#: Modes of :class:`CombinedLoader`; Lightning has the same.
MODES = ("min_size", "max_size", "max_size_cycle", "sequential")

#: Stands for a batch after a loader has run out.
_OUT = object()


class CombinedLoader:
    """Give one batch of each of several loaders at a time, in the shape in which they were given.

    The loaders are in a dict or list, which may hold dicts, lists and other CombinedLoaders. Such a
    dict or list of loaders to train on becomes one with ``"max_size_cycle"``. To evaluate it, the
    mode is ``"sequential"``: one loader after the other, with ``dataloader_idx``. A CombinedLoader
    of another mode is validated and tested with its combined batches.

    Each loader has its own part of the ranks' data and its own workers. With several ranks, the
    passes of a loader that begins again have the same order within one epoch.

    Source: ``lightning.pytorch.utilities.CombinedLoader``, with the same modes and default.

    Args:
        iterables: a dict or list of loaders, or of dicts and lists of them.
        mode: the end of an epoch, if it is not ``"sequential"``. ``"min_size"``: the end of the
            first loader. ``"max_size"``: the end of the last; a loader that has ended gives
            ``None``. ``"max_size_cycle"``: the same, but a loader that has ended begins again.

    Raises:
        UsageError: an unknown mode, no loader, the same loader twice, or something else among them.
    """

    def __init__(
        self, iterables: Mapping[Any, Any] | list[Any] | tuple[Any, ...], mode: str = "min_size"
    ) -> None:
        if mode not in MODES:
            known = ", ".join(map(repr, MODES))
            message = f"CombinedLoader: mode={mode!r} is unknown. {nearest(str(mode), MODES)}"
            raise UsageError(f"{message} Fix: use one of {known}")
        if not isinstance(iterables, Mapping | list | tuple) or not iterables:
            message = (
                type(iterables).__name__ if iterables else f"an empty {type(iterables).__name__}"
            )
            raise UsageError(
                f"CombinedLoader takes several loaders, and got {message}. Fix: {_FIX}"
            )
        self.iterables, self.mode = iterables, mode
        #: Its loaders, and CombinedLoaders in it, by their keys and positions, as errors name them.
        self.named: dict[str, Any] = dict(_leaves(iterables))
        _check(self.named, mode)

    @property
    def loaders(self) -> list[Any]:
        """The loaders in their order, also those in CombinedLoaders that it holds."""
        return [
            loader
            for item in self.named.values()
            for loader in (item.loaders if isinstance(item, CombinedLoader) else [item])
        ]

    @property
    def num_workers(self) -> int:
        """The largest number of workers of a loader."""
        return max(getattr(loader, "num_workers", 0) for loader in self.loaders)

    def loaders_for(self, stage: str) -> list[Any]:
        """Return the loaders that a stage iterates: itself, or in the mode sequential each in turn.

        Raises:
            UsageError: the mode is not for this stage.
        """
        if self.mode != "sequential" and stage != "predict":
            return [self]
        message, hint = f"a CombinedLoader to {stage} has mode={self.mode!r}", "'sequential'"
        if stage == "train":
            hint = "another mode, or a DataLoader of torch.utils.data.ConcatDataset"
        elif self.mode == "sequential":
            return [
                loader
                for item in self.named.values()
                for loader in (
                    item.loaders_for(stage) if isinstance(item, CombinedLoader) else [item]
                )
            ]
        raise UsageError(f"{message}. Fix: use {hint}")

    def each_loader(self, function: Callable[[Any], Iterable[Any]]) -> CombinedLoader:
        """Return a copy in which a function that returns a loader replaces each loader.

        Raises:
            TrainingError: a rank would evaluate a loader's batch that it got to repeat.
        """
        replaced = [
            item.each_loader(function) if isinstance(item, CombinedLoader) else function(item)
            for item in self.named.values()
        ]
        for name, loader in zip(self.named, replaced, strict=True):
            if self.mode != "min_size" and _is_repeated(loader):
                message = (
                    f"CombinedLoader: {name} has fewer batches or samples than there are ranks"
                )
                raise TrainingError(f"{message}. Fix: fewer devices, or mode='min_size'")
        return CombinedLoader(self.shaped(replaced), self.mode)

    def shaped(self, items: list[Any]) -> Any:
        """Return one item for each loader in the shape of the loaders; tuples become lists."""
        return _shaped(self.iterables, iter(items))

    def __len__(self) -> int:
        for name, loader in self.named.items():
            if length(loader) == 0:
                raise empty(name, loader)
        lengths = [length(loader) for loader in self.named.values()]
        known = [number for number in lengths if number is not None]
        if len(known) < len(lengths):
            raise TypeError("CombinedLoader has no length, because one of its loaders has none")
        if self.mode == "sequential":
            return sum(known)
        return min(known) if self.mode == "min_size" else max(known)

    def __iter__(self) -> Iterator[Any]:
        if self.mode == "sequential":
            raise UsageError("a sequential CombinedLoader is not iterated: its loaders are")
        return _Batches(self)


_FIX = "give a dict or list of DataLoaders"


def _leaves(thing: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each loader in nested dicts, lists and tuples, with its keys and positions."""
    if not name or _holds_items(thing):
        keys = thing if isinstance(thing, Mapping) else range(len(thing))
        for key in keys:
            yield from _leaves(thing[key], f"{name}[{key!r}]")
    else:
        yield name, thing


def _holds_items(thing: Any) -> bool:
    """True for a dict, list or tuple of loaders; False for a loader, and for a list of batches."""
    if not isinstance(thing, Mapping | list | tuple):
        return False
    found = list(_deep(thing))
    has_loader = any(isinstance(item, DataLoader | CombinedLoader) for item in found)
    return has_loader or (
        bool(found) and all(isinstance(item, Iterable) and not _is_batch(item) for item in found)
    )


def _deep(thing: Any) -> Iterator[Any]:
    if isinstance(thing, Mapping | list | tuple):
        for item in thing.values() if isinstance(thing, Mapping) else thing:
            yield from _deep(item)
    else:
        yield thing


def _shaped(thing: Any, items: Iterator[Any], is_first: bool = True) -> Any:
    if not is_first and not _holds_items(thing):
        return next(items)
    if isinstance(thing, Mapping):
        return {key: _shaped(value, items, False) for key, value in thing.items()}
    return [_shaped(value, items, False) for value in thing]


def _is_repeated(loader: Any) -> bool:
    """True if a rank has no part of a loader to evaluate, and got one to repeat."""
    samplers = Stage([loader]).samplers()
    return any(getattr(sampler, "empty", False) and not sampler.even for sampler in samplers)


def _check(named: Mapping[str, Any], mode: str) -> None:
    """Refuse an item that is not a loader, or that cannot begin again."""
    seen: dict[int, str] = {}
    for name, loader in named.items():
        message, hint = "", _FIX
        if isinstance(loader, CombinedLoader):
            if "sequential" in (loader.mode, mode) and loader.mode != mode:
                message = f"has mode={loader.mode!r} in a CombinedLoader of mode={mode!r}"
                hint = "use 'sequential' for both, or for neither"
        elif _is_batch(loader) or not isinstance(loader, Iterable) or isinstance(loader, Mapping):
            message = f"is a {type(loader).__name__}, which is not a loader"
        elif isinstance(loader, Iterator):
            message = f"is a {type(loader).__name__}, which can be read only once"
            hint = "use a DataLoader or a list"
        for single in loader.loaders if isinstance(loader, CombinedLoader) else [loader]:
            if id(single) in seen and not message:
                message = f"is the loader of {seen[id(single)]} again"
                hint = "make another DataLoader of the dataset"
            seen[id(single)] = name
        if message:
            raise UsageError(f"CombinedLoader: {name} {message}. Fix: {hint}")


def _is_batch(thing: Any) -> bool:
    return isinstance(thing, str | bytes) or hasattr(thing, "to") or hasattr(thing, "__array__")


def empty(name: str, loader: Any, when: str = "is empty") -> TrainingError:
    """Return the error for a loader of a CombinedLoader that gives no batch."""
    hint = "give it samples, or a smaller batch_size with drop_last"
    dataset = getattr(loader, "dataset", None)
    of_dataset = "" if dataset is None else f" of {type(dataset).__name__}"
    found = f"CombinedLoader: {name} {when}: {type(loader).__name__}{of_dataset}"
    return TrainingError(f"{found}. Fix: {hint}")


class _Batches:
    """One pass over a CombinedLoader."""

    def __init__(self, combined: CombinedLoader) -> None:
        self._combined = combined
        self._names, self._loaders = list(combined.named), list(combined.named.values())
        self._iterators = [iter(loader) for loader in self._loaders]
        #: The indices of the loaders that have ended once.
        self._ended: set[int] = set()
        self._began, self._restarts = False, 0
        # A loader begins again between training steps, which draw random numbers too. A run that
        # resumes repeats the batches without the steps, so the draws must not depend on them.
        cycles = combined.mode == "max_size_cycle"
        self._seed = int(torch.empty((), dtype=torch.int64).random_().item()) if cycles else 0

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Any:
        batches = []
        for index in range(len(self._iterators)):
            batches.append(self._next_of(index))
        self._began = True
        return self._combined.shaped(batches)

    def _next_of(self, index: int) -> Any:
        """Return a loader's next batch.

        Raises:
            StopIteration: the epoch ends.
            TrainingError: the loader is empty.
        """
        mode = self._combined.mode
        if mode == "max_size" and index in self._ended:
            return None
        batch = next(self._iterators[index], _OUT)
        if batch is not _OUT:
            return batch
        if not self._began:
            raise empty(self._names[index], self._loaders[index], "gave no batch")
        self._ended.add(index)
        if mode == "min_size" or len(self._ended) == len(self._loaders):
            raise StopIteration
        return None if mode == "max_size" else self._again(index)

    def _again(self, index: int) -> Any:
        """Begin a loader again and return its first batch."""
        loader, self._restarts = self._loaders[index], self._restarts + 1
        with drawing_from(self._seed + self._restarts):
            self._iterators[index] = iter(loader)
            batch = next(self._iterators[index], _OUT)
        if batch is _OUT:
            raise empty(self._names[index], loader, "gave no batch when it began again")
        return batch

    def close(self) -> None:
        """Close the loaders' iterators."""
        for iterator, loader in zip(self._iterators, self._loaders, strict=True):
            close_batches(iterator, loader)
