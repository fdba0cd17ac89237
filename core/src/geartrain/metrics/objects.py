"""Metric objects of other libraries in ``self.log``, such as torchmetrics'.

An entry point of the group ``geartrain.metrics``, named as the library, is a module or an object
with the functions of :class:`MetricLibrary`. It is imported only if the script has imported the
library.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from geartrain.errors import TrainingError
from geartrain.errors.distributions import entry_points

if TYPE_CHECKING:
    from geartrain.loop.run import Run
    from geartrain.metrics.local import MetricOptions


class MetricLibrary(Protocol):
    """The functions by which ``self.log`` handles a library's objects, which have ``reset()``."""

    def owns(self, thing: Any) -> bool:
        """Return True if it is one of the library's objects, or a mapping of them."""

    def items(self, dictionary: Any) -> Iterable[tuple[str, Any]]:
        """Return the names and objects that ``log_dict`` logs for a mapping of the library's."""

    def newest(self, name: str, thing: Any, options: MetricOptions) -> Any:
        """Return the value of the newest batch if it is logged ``on_step``, otherwise ``None``.

        Raises:
            TrainingError: it cannot be logged, or not with these options.
        """

    def compute(self, run: Run, name: str, thing: Any) -> float:
        """Return an object's value over all ranks, which call this together.

        Raises:
            TrainingError: the value is not one number.
        """

    def states(self, module: nn.Module) -> dict[str, Any]:
        """Return the objects' states since their last reset, as tensors and plain values."""

    def set_states(self, module: nn.Module, states: Mapping[str, Any]) -> None:
        """Restore the states that :meth:`states` returned."""

    def temporary_copies(self, module: nn.Module) -> AbstractContextManager[None]:
        """Replace a module's objects by copies, for a batch that must not count in them."""


def libraries() -> dict[str, MetricLibrary]:
    """Return the imported libraries, by name; decide no collective by it: ranks may differ."""
    return {name: _load(name) for name in _declared() if name in sys.modules}


def library_of(thing: Any) -> MetricLibrary | None:
    """Return the library whose object this is."""
    return next((library for library in libraries().values() if library.owns(thing)), None)


def path_of(module: nn.Module, thing: Any) -> str:
    """Return an object's path in a module; "" if it is no submodule."""
    return next((path for path, part in module.named_modules() if part is thing), "")


def refuse_unknown(name: str, value: nn.Module) -> None:
    """Refuse an object of torchmetrics if no installed distribution knows it.

    Raises:
        TrainingError: it is one; the message ends in the ``pip install`` line.
    """
    if any(c.__module__.partition(".")[0] == "torchmetrics" for c in type(value).__mro__):
        raise TrainingError(
            f"self.log({name!r}): {type(value).__name__} is an object of torchmetrics. "
            "Fix: pip install geartrain-callbacks"
        )


@cache
def _declared() -> tuple[str, ...]:
    return tuple(entry_points(group="geartrain.metrics").names)


@cache
def _load(name: str) -> MetricLibrary:
    library: MetricLibrary = next(iter(entry_points(group="geartrain.metrics", name=name))).load()
    return library
