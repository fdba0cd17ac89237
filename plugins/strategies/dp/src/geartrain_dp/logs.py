"""Combine the calls of ``self.log`` on the replicas into one entry for the whole batch."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch

from geartrain import Module, Run, TrainingError
from geartrain_callbacks.parts.combine import combine_logged
from geartrain_callbacks.torchmetrics_objects import is_metric
from geartrain_dp.metrics import PartMetrics, Seen, whole_batch

#: The options of ``self.log``, in its order.
_OPTIONS = tuple(inspect.signature(Module.log).parameters)[3:]


@dataclass(slots=True)
class _Call:
    """One call of ``self.log`` in one part."""

    value: Any
    #: Weight in a mean: ``batch_size``, otherwise the samples in the part.
    weight: int
    batch_size: int | None
    options: dict[str, Any]


class PartLogs:
    """Replacement of ``run.logs`` while the parts run; afterwards it logs the combined values.

    Args:
        run: the run whose ``logs`` are replaced.
        sizes: number of samples in each part.
        metrics: the module's torchmetrics objects.
        copies: their copies, kept from batch to batch.
    """

    def __init__(
        self, run: Run, sizes: list[int], metrics: PartMetrics, copies: dict[str, tuple[Any, Any]]
    ) -> None:
        self._run, self._logs, self._sizes = run, run.logs, sizes
        self._metrics, self._copies = metrics, copies
        #: (name, number of earlier calls in the part) -> part -> the call.
        self._calls: dict[tuple[str, int], dict[int, _Call]] = {}
        self._counts: dict[tuple[str, int], int] = {}
        self._lock = threading.Lock()
        #: ``index``: the part that the current thread runs.
        self._here = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logs, name)

    @contextmanager
    def temporary_copies(self) -> Iterator[None]:
        """Replace ``run.logs`` inside the block; then log the records, unless a part failed."""
        self._run.logs = self  # type: ignore[assignment]
        try:
            yield
        finally:
            self._run.logs = self._logs
        self._replay()

    @contextmanager
    def part(self, index: int) -> Iterator[None]:
        """Assign all calls of this thread inside the block to this part."""
        self._here.index = index
        self._metrics.begin(index)
        try:
            yield
        finally:
            self._here.index = None

    def log(self, name: str, value: Any, *arguments: Any, **named: Any) -> None:
        options = dict(zip(_OPTIONS, arguments, strict=False)) | named
        batch_size = options.pop("batch_size", None)
        index = getattr(self._here, "index", None)
        is_number = (
            value.numel() == 1
            if isinstance(value, torch.Tensor)
            else isinstance(value, Number) and not isinstance(value, complex)
        )
        if index is not None and is_metric(value):
            value, is_number = self._metrics.seen(name, value), True
        if index is None or not is_number or not isinstance(name, str):
            # Logged outside a part; or wrong, so that core's error shows the user's line.
            self._logs.log(name, value, batch_size=batch_size, **options)
            return
        if isinstance(value, torch.Tensor):
            value = value.detach().clone()  # it may change in place before all parts have run
        with self._lock:
            occurrence = self._counts.get((name, index), 0)
            self._counts[name, index] = occurrence + 1
            weight = self._sizes[index] if batch_size is None else batch_size
            self._calls.setdefault((name, occurrence), {})[index] = _Call(
                value, weight, batch_size, options
            )

    def _replay(self) -> None:
        for (name, _), by_part in self._calls.items():
            calls = [by_part[index] for index in sorted(by_part)]
            differing = next((call for call in calls if call.options != calls[0].options), None)
            if differing is not None:  # let core's error name the option that differs
                self._log(name, calls[0].value, calls[0].batch_size, calls[0].options)
                self._log(name, differing.value, differing.batch_size, differing.options)
            if any(isinstance(call.value, Seen) for call in calls):
                self._replay_metric(name, calls)
                continue
            whole = len(calls) == len(self._sizes) and all(
                call.batch_size is None for call in calls
            )
            # Without a batch_size, core weights by the whole batch, as in one process.
            self._log(
                name,
                combine_logged(
                    [call.value for call in calls],
                    [call.weight for call in calls],
                    calls[0].options.get("reduce_fx", "mean"),
                    self._run.device,
                ),
                None if whole else sum(call.weight for call in calls),
                calls[0].options,
            )

    def _replay_metric(self, name: str, calls: list[_Call]) -> None:
        """Log a torchmetrics object once; by now it has seen all parts."""
        first, options = calls[0].value, calls[0].options
        seen = [
            call.value
            for call in calls
            if isinstance(call.value, Seen) and call.value.metric is getattr(first, "metric", None)
        ]
        if len(seen) < len(calls):
            raise TrainingError(
                f"self.log({name!r}): the parts of a batch logged different objects. "
                "Fix: use one name per metric"
            )
        on_step = options.get("on_step")
        if self._run.stage == "train" if on_step is None else on_step:
            whole_batch(seen, self._run.device, self._copies, name)
        self._log(name, first, calls[0].batch_size, options)

    def _log(self, name: str, value: Any, batch_size: int | None, options: dict[str, Any]) -> None:
        self._logs.log(
            name,
            value.metric if isinstance(value, Seen) else value,
            batch_size=batch_size,
            **options,
        )
