"""PyTorch Lightning's ``ThroughputMonitor``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from geartrain import Run, UsageError, hookimpl
from geartrain_callbacks.throughput import Throughput


class ThroughputMonitor(Throughput):
    """Log the speed of training under PyTorch Lightning's names.

    The names are ``train/device/batches_per_sec``, ``.../samples_per_sec``, ``.../items_per_sec``,
    ``.../flops_per_sec`` and ``.../mfu`` for one device, with several processes also
    ``train/batches_per_sec`` and so on for all; and the totals of this process: ``train/time`` in
    seconds, ``train/batches``, ``train/samples`` and ``train/lengths``. They are measured at
    flushes, without validation, as by :class:`Throughput`.

    Floating-point operations are the module's attribute ``flops_per_batch``, if it has one.

    Args:
        batch_size_fn: returns the samples of a batch.
        length_fn: returns the items of a batch, such as tokens; default: do not count them.
        available_flops: the most operations per second of one device; default as ``peak_flops`` of
            :class:`Throughput`.
        window_size: batches over which speeds are measured, at least those of one flush.
        separator: the text between the parts of a name.

    Raises:
        UsageError: an option is wrong.
    """

    def __init__(
        self,
        batch_size_fn: Callable[[Any], int],
        length_fn: Callable[[Any], int] | None = None,
        available_flops: float | None = None,
        window_size: int = 100,
        separator: str = "/",
    ) -> None:
        given = (("batch_size_fn", batch_size_fn), ("length_fn", length_fn or len))
        for name, function in given:
            if not callable(function):
                message = f"throughput: {name}={function!r} is not a function"
                raise UsageError(f"{message}. Fix: a function of a batch, as {name}=len")
        if isinstance(window_size, bool) or not isinstance(window_size, int) or window_size < 1:
            message = f"throughput: window_size={window_size!r}"
            raise UsageError(f"{message} must be a whole number of batches, at least 1.")
        if available_flops is not None and not available_flops > 0:
            raise UsageError(f"throughput: available_flops={available_flops!r} must be above 0.")
        super().__init__(tokens=length_fn, flops=False, peak_flops=available_flops)
        self.batch_size_fn, self.length_fn = batch_size_fn, length_fn
        self.available_flops, self.separator = available_flops, separator
        self.window_size = self._window = window_size

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        super().on_run_start(run)
        self._began = self._now()

    def _size(self, batch: Any) -> int:
        return self.batch_size_fn(batch)

    def _log(self, run: Run, seconds: float) -> None:
        speeds = self._per_second(seconds)
        items = speeds.pop("tokens_per_sec")
        if self.length_fn is not None:
            speeds["items_per_sec"] = items
        flops = getattr(run.module, "flops_per_batch", None)
        if flops is not None:
            speeds["flops_per_sec"] = speeds["batches_per_sec"] * flops
        now, *totals = self._points[-1]
        names = ("batches", "samples", "lengths")[: 2 + (self.length_fn is not None)]
        figures = {"time": now - self._began, **dict(zip(names, totals, strict=False))}
        devices = run.plan.layout.devices_per_process
        for name, speed in speeds.items():
            share = 1 if name == "batches_per_sec" else devices
            figures[self.separator.join(("device", name))] = speed / share
            if run.world.data_size > 1:
                figures[name] = speed * run.world.data_size
        if self._peak and flops is not None:
            mfu = speeds["flops_per_sec"] / devices / self._peak
            figures[self.separator.join(("device", "mfu"))] = mfu
        for name, value in figures.items():
            path = self.separator.join(("train", name))
            run.log(path, value, on_step=True, on_epoch=False, batch_size=1)
