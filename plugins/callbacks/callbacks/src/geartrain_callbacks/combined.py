"""Several loaders whose batches come together, as one loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from geartrain import TrainingError, UsageError
from geartrain.plugin_api import close_batches, drawing_from, length, nearest

#: Modes of :class:`CombinedLoader`; Lightning has the same.
MODES = ("min_size", "max_size", "max_size_cycle", "sequential")

#: Stands for a batch after a loader has run out.
_OUT = object()


class CombinedLoader:
    """Give one batch of each of several loaders at a time, in a dict or list of their shape.

    A dict or list of loaders to train on becomes one with ``"max_size_cycle"``. To evaluate, the
    mode is ``"sequential"``: one loader after the other, with ``dataloader_idx``.

    Each loader has its own part of the ranks' data and its own workers. With several ranks, the
    passes of a loader that begins again have the same order within one epoch.

    Source: ``lightning.pytorch.utilities.CombinedLoader``, with the same modes and default.

    Args:
        iterables: a dict or list of loaders.
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
        self._keys = list(iterables) if isinstance(iterables, Mapping) else None
        keys = range(len(iterables)) if self._keys is None else self._keys
        #: Its loaders by their keys or positions, as errors name them.
        self.named: dict[str, Any] = {f"[{key!r}]": iterables[key] for key in keys}
        _check(self.named)

    @property
    def loaders(self) -> list[Any]:
        """The loaders, in their order."""
        return list(self.named.values())

    @property
    def num_workers(self) -> int:
        """The largest number of workers of a loader."""
        return max(getattr(loader, "num_workers", 0) for loader in self.loaders)

    def loaders_for(self, stage: str) -> list[Any]:
        """Return the loaders that a stage iterates: itself to train, to evaluate each in turn.

        Raises:
            UsageError: the mode is for the other.
        """
        if stage == "train" and self.mode == "sequential":
            message = "a CombinedLoader to train has mode='sequential'"
            hint = "use a DataLoader of torch.utils.data.ConcatDataset, or another mode"
            raise UsageError(f"{message}. Fix: {hint}")
        if stage != "train" and self.mode != "sequential":
            message = f"a CombinedLoader to {stage} has mode={self.mode!r}"
            raise UsageError(f"{message}. Fix: use mode='sequential', or a list of loaders")
        return [self] if stage == "train" else self.loaders

    def each_loader(self, function: Callable[[Any], Iterable[Any]]) -> CombinedLoader:
        """Return a copy in which a function that returns a loader replaces each loader."""
        return CombinedLoader(self.shaped(list(map(function, self.loaders))), self.mode)

    def shaped(self, items: list[Any]) -> Any:
        """Return one item for each loader in a dict or list."""
        return items if self._keys is None else dict(zip(self._keys, items, strict=True))

    def __len__(self) -> int:
        for name, loader in self.named.items():
            if length(loader) == 0:
                raise empty(name, loader)
        lengths = [length(loader) for loader in self.loaders]
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


def _check(named: Mapping[str, Any]) -> None:
    """Refuse an item that is not a loader, or that cannot begin again."""
    seen: dict[int, str] = {}
    for name, loader in named.items():
        message, hint = "", _FIX
        if isinstance(loader, CombinedLoader) or _holds_loaders(loader):
            message, hint = "holds loaders itself", f"{_FIX}, without nesting"
        elif _is_batch(loader) or not isinstance(loader, Iterable):
            message = f"is a {type(loader).__name__}, which is not a loader"
        elif isinstance(loader, Iterator):
            message = f"is a {type(loader).__name__}, which can be read only once"
            hint = "use a DataLoader or a list"
        elif id(loader) in seen:
            message = f"is the loader of {seen[id(loader)]} again"
            hint = "make another DataLoader of the dataset"
        if message:
            raise UsageError(f"CombinedLoader: {name} {message}. Fix: {hint}")
        seen[id(loader)] = name


def _holds_loaders(thing: Any) -> bool:
    items = thing.values() if isinstance(thing, Mapping) else thing
    is_form = isinstance(thing, Mapping | list | tuple)
    return is_form and any(isinstance(item, torch.utils.data.DataLoader) for item in items)


def _is_batch(thing: Any) -> bool:
    is_text = isinstance(thing, str | bytes)
    return (
        is_text or isinstance(thing, Mapping) or hasattr(thing, "to") or hasattr(thing, "__array__")
    )


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
        self._names, self._loaders = list(combined.named), combined.loaders
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
