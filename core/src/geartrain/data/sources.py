"""The source of a run's loaders: those given, a DataModule or the module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from geartrain.data.loaders import is_loader
from geartrain.errors import UsageError, warn
from geartrain.errors.distributions import import_from
from geartrain.module.module import DataModule, Module, overridden

#: stage -> the method that returns its loaders.
_METHODS = {
    "train": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}


@dataclass(frozen=True, slots=True)
class DataSource:
    """The source of a run's loaders."""

    #: stage -> the loaders that the user passed to ``Trainer``, if any.
    given: Mapping[str, Any]
    datamodule: DataModule | None = None

    @staticmethod
    def method(stage: str) -> str:
        """Return the name of the method that makes a stage's loaders."""
        return _METHODS[stage]

    def missing(self, stage: str) -> UsageError:
        """Return the error for a stage without loaders."""
        hint = f"give one, or define {_METHODS[stage]} on the module or a DataModule"
        return UsageError(f"there is no loader to {stage}. Fix: {hint}")

    def check(self, stage: str, module: Module) -> None:
        """Refuse a stage of a command without a source of loaders, or with two.

        Raises:
            UsageError: no loaders are given, and no method makes them; or both.
        """
        method, data = _METHODS[stage], self.datamodule
        makes = (data is not None and overridden(data, method)) or hasattr(module, method)
        if self.given.get(stage) is None and not makes:
            raise self.missing(stage)
        if self.given.get(stage) is not None and data is not None and overridden(data, method):
            message = f"a {stage} loader is given, and {type(data).__name__} has {method}"
            raise UsageError(f"{message}. Fix: give one of them")

    def loaders(self, stage: str, module: Module) -> list[Iterable[Any]]:
        """Return the loaders of a stage: those given, else the DataModule's, else the module's.

        Raises:
            UsageError: the loaders are neither loaders nor batches.
        """
        given, method = self.given.get(stage), _METHODS[stage]
        owner: Module | DataModule = module
        if self.datamodule is not None and overridden(self.datamodule, method):
            owner = self.datamodule
        if given is None and callable(getattr(owner, method, None)):
            given = getattr(owner, method)()
            if given is None and stage == "validate":
                message = f"{type(owner).__name__}.{method} returned None"
                warn(f"{message}, so there is nothing to validate")
        return [] if given is None else read_loaders(given, stage)


def read_loaders(given: Any, stage: str) -> list[Iterable[Any]]:
    """Return the loaders in a stage's data, in their order.

    Args:
        given: a loader, batches, or nested lists and dicts of loaders.

    Returns:
        The loaders. Several to train on are one :class:`geartrain.CombinedLoader`.

    Raises:
        UsageError: it holds no loaders; or it cannot be iterated.
    """
    if hasattr(given, "loaders_for"):  # a CombinedLoader, or an object like it
        return _in_turn(given, stage)
    found = list(_leaves(given))
    loaders = [item for item in found if is_loader(item)]
    kind, is_list = type(given).__name__, isinstance(given, list | tuple)
    is_text_or_frame = isinstance(given, str | bytes) or hasattr(given, "itertuples")
    if not isinstance(given, Iterable) or is_text_or_frame:  # a data frame iterates its columns
        message = f"the {stage} loader is {_shown(given)}, which is not a loader"
        raise UsageError(f"{message}. Fix: use a DataLoader or an iterable of batches")
    has_loader = any(isinstance(item, DataLoader) for item in found)
    if isinstance(given, Mapping) or (is_list and has_loader):
        if not found or len(loaders) < len(found):
            others = dict.fromkeys(type(item).__name__ for item in found if not is_loader(item))
            message = f"the {kind} to {stage} holds {', '.join(others) or 'nothing'}"
            raise UsageError(f"{message} in place of loaders. Fix: give loaders alone in it")
    elif not is_list or not found or len(loaders) < len(found):
        return [given]
    if stage != "train" or not isinstance(given, Mapping | list | tuple):
        return [loader for item in loaders for loader in _in_turn(item, stage)]
    if is_list and len(given) == 1:
        message = f"a {kind} of one loader is given to train on"
        raise UsageError(f"{message}. Fix: give the loader itself, or a dict for batches in a dict")
    callbacks = import_from("geartrain_callbacks", f"CombinedLoader, for a {kind} to train on,")
    return [callbacks.CombinedLoader(given, "max_size_cycle")]


def _in_turn(loader: Any, stage: str) -> list[Any]:
    return loader.loaders_for(stage) if hasattr(loader, "loaders_for") else [loader]


def _shown(thing: Any) -> str:
    return text if len(text := repr(thing)) < 60 else f"a {type(thing).__name__}"


def _leaves(thing: Any) -> Iterator[Any]:
    """Yield the leaves of nested lists, tuples and dicts."""
    if isinstance(thing, Mapping | list | tuple):
        for item in thing.values() if isinstance(thing, Mapping) else thing:
            yield from _leaves(item)
    else:
        yield thing
