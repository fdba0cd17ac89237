"""Keep what a step logs until it is done, and make one number of those of a batch's parts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch

from geartrain import Module, Run
from geartrain.plugin_api import reductions
from geartrain_callbacks.parts.combine import combine_logged

#: The options of ``self.log``, in its order.
_OPTIONS = tuple(inspect.signature(Module.log).parameters)[3:]


@dataclass(slots=True)
class _Call:
    """One call of ``self.log``."""

    name: str
    value: Any
    options: dict[str, Any]
    #: The batch, of which the call may be of one part.
    batch: Any
    #: The samples of the part.
    size: int


class StepLogs:
    """Keeps the numbers that a step logs, so that a step that is repeated logs them once.

    In the block it takes the place of ``run.logs.log``. At its end, or before, it passes them on:
    for the parts of a batch one number.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._store, self._log = run, run.logs, run.logs.log
        #: (batch, is of a part, name, call in the part) -> the calls of all parts.
        self._calls: dict[tuple[int, bool, str, int], list[_Call]] = {}
        self._counts: dict[str, int] = {}
        self._batches, self._size, self._batch = 0, 0, None
        self.are_passed_on = False

    def __enter__(self) -> None:
        self._store.log = self._keep  # type: ignore[method-assign]

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is not None and issubclass(kind, torch.OutOfMemoryError):
            vars(self._store).pop("log", None)
        else:
            self.pass_on()

    @contextmanager
    def of_part(self, batch: Any, part: Any, index: int, size: int) -> Iterator[None]:
        """Count what is logged in the block as of a part of a batch, with its samples."""
        self._batches += index == 0
        self._batch, self._size, self._counts = batch, size, {}
        self._run.batch = part
        try:
            yield
        finally:
            self._batch, self._size, self._counts = None, 0, {}
            self._run.batch = batch

    def _keep(self, name: str, value: Any, *arguments: Any, **named: Any) -> None:
        is_number = isinstance(value, Number)
        if isinstance(value, torch.Tensor) and (is_number := value.numel() == 1):
            value = value.detach().clone()  # it may change in place
        if not is_number:  # an object of torchmetrics keeps its values; the rest is refused
            self._log(name, value, *arguments, **named)
            return
        count = self._counts[name] = self._counts.get(name, 0) + 1
        options = dict(zip(_OPTIONS, arguments, strict=False)) | named
        batch = self._batch if self._size else self._run.batch
        key = self._batches, self._size > 0, name, count
        call = _Call(name, value, options, batch, self._size)
        self._calls.setdefault(key, []).append(call)

    def pass_on(self) -> None:
        """Log what was kept; from here on values are logged at once."""
        if self.are_passed_on:
            return
        self.are_passed_on = True
        vars(self._store).pop("log", None)
        run, current = self._run, self._run.batch
        try:
            for calls in self._calls.values():
                run.batch = calls[0].batch
                for call in _one_call(calls, run.device):
                    self._log(call.name, call.value, **call.options)
        finally:
            run.batch = current
            self._calls.clear()  # they hold the batches


def _one_call(calls: list[_Call], device: torch.device) -> list[_Call]:
    """Return one call for those of the parts of a batch; all of them for a user's reduction."""
    reduce_fx = calls[0].options.get("reduce_fx", "mean")
    if len(calls) == 1 or reductions.key(reduce_fx) not in reductions.NAMED:
        return calls
    sizes = [call.options.get("batch_size") for call in calls]
    weights = [call.size if size is None else size for call, size in zip(calls, sizes, strict=True)]
    value = combine_logged([call.value for call in calls], weights, reduce_fx, device)
    size = None if None in sizes else sum(weights)
    options = {**calls[0].options, "batch_size": size}
    return [_Call(calls[0].name, value, options, calls[0].batch, sum(weights))]
