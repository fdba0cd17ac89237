"""``throughput``: samples, tokens and floating-point operations per second."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from geartrain import Run, UsageError, hookimpl
from geartrain.plugin_api import BatchSizer
from geartrain_callbacks.callback import PluginCallback

#: Dense 16-bit operations per second of a GPU, by a part of its name; the first match counts.
#: Source: NVIDIA's pages https://www.nvidia.com/en-us/data-center/h200/, .../h100/, .../a100/.
#: Their figures "with sparsity" are twice as large.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
}

#: 16-bit precisions, for which PEAK_FLOPS is valid.
_HALF = ("16-mixed", "bf16-mixed", "bf16-true")


class Throughput(PluginCallback):
    """Log the speed of training.

    The names are ``device/batches_per_sec``, ``device/samples_per_sec``,
    ``device/tokens_per_sec``, ``device/flops_per_sec`` and ``device/mfu``; all but the last also
    under ``global/`` for all devices.

    The speed is measured from one flush to the next (``log_every_n_steps``), because the CPU waits
    for the device there anyway. Kernels run asynchronously: a clock read after each step would
    measure how fast work is queued, and waiting in each step would slow training down. Loading
    data and saving are included, validation is not. The first values come with the second flush.

    No communication: ``global/`` is this rank's value times the number of processes, which step
    together.

    Floating-point operations are counted once, in this rank's first step (forward and backward),
    by ``torch.utils.flop_counter.FlopCounterMode``. It counts matrix products, convolutions and
    attention, and makes that step slower. They are not counted if a process drives several
    devices. Model FLOPs utilisation (MFU) is their share of the GPU's peak.

    Args:
        tokens: tokens per sample, or a function that counts the tokens of a batch; default: do not
            count tokens.
        flops: count floating-point operations.
        peak_flops: the most operations per second of one device. Default: known for 16 bits on
            NVIDIA H200, H100 and A100; otherwise ``device/mfu`` is not logged.

    Raises:
        UsageError: ``tokens`` or ``peak_flops`` is wrong.
    """

    def __init__(
        self,
        tokens: int | Callable[[Any], int] | None = None,
        flops: bool = True,
        peak_flops: float | None = None,
    ) -> None:
        if isinstance(tokens, bool) or not (
            tokens is None or callable(tokens) or (isinstance(tokens, int) and tokens > 0)
        ):
            raise UsageError(
                f"throughput: tokens={tokens!r}. "
                "Fix: use a number of tokens in a sample, or a function of a batch"
            )
        if peak_flops is not None and not peak_flops > 0:
            raise UsageError(f"throughput: peak_flops={peak_flops!r} must be above 0.")
        self.tokens, self.flops, self.peak_flops = tokens, flops, peak_flops

    #: Batches over which speeds are measured, if they are more than those of one flush.
    _window = 0

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        #: Batches, samples and tokens of this run.
        self._done = [0, 0, 0]
        #: The time and ``_done`` of the last flushes.
        self._points: deque[tuple[float, int, int, int]] = deque()
        self._sizer = (
            BatchSizer(run.stages["train"].loaders[0], run.world.rank == 0)
            if run.stages["train"].loaders
            else BatchSizer(None)
        )
        #: Floating-point operations of one sample.
        self._per_sample: float | None = None
        #: Seconds of finished validations, and the start of the running one.
        self._pauses, self._paused = 0.0, 0.0
        self._counts = self.flops and run.plan.layout.devices_per_process == 1
        self._peak = self.peak_flops or _known_peak(run)

    @hookimpl(wrapper=True)
    def step(self, run: Run, micro_batches: Sequence[Any]) -> Generator[None, None, None]:
        counter = (
            FlopCounterMode(display=False) if self._counts and self._per_sample is None else None
        )
        if counter is None:
            yield
        else:
            with counter:
                yield
        samples = sum(map(self._size, micro_batches))
        self._done[0] += len(micro_batches)
        self._done[1] += samples
        if callable(self.tokens):
            self._done[2] += sum(map(self.tokens, micro_batches))
        elif self.tokens:
            self._done[2] += samples * self.tokens
        if counter is not None:
            self._per_sample = counter.get_total_flops() / samples if samples else 0.0

    @hookimpl
    def on_step_end(self, run: Run) -> None:
        if run.step % run.plan.options.log_every_n_steps:
            return
        _wait(run.device)  # the flush, which is next, waits for the device anyway
        batches, samples, tokens = self._done
        self._points.append((self._now(), batches, samples, tokens))
        while len(self._points) > 2 and self._done[0] - self._points[0][1] > self._window:
            self._points.popleft()
        seconds = self._points[-1][0] - self._points[0][0]
        if seconds > 0:
            self._log(run, seconds)

    def _size(self, batch: Any) -> int:
        return self._sizer.size(batch) or 0

    def _now(self) -> float:
        """Return the time without that of validations."""
        return time.perf_counter() - self._pauses

    @hookimpl(specname="on_validation_start")
    def _on_validation_start(self, run: Run) -> None:
        _wait(run.device)  # finish the training steps before validation is timed
        self._paused = time.perf_counter()

    @hookimpl(specname="on_validation_end")
    def _on_validation_end(self) -> None:
        self._pauses += time.perf_counter() - self._paused

    def _per_second(self, seconds: float) -> dict[str, float]:
        """Return this process's speed."""
        names = ("batches_per_sec", "samples_per_sec", "tokens_per_sec")
        first, last = self._points[0][1:], self._points[-1][1:]
        counts = zip(names, first, last, strict=True)
        return {name: (after - before) / seconds for name, before, after in counts}

    def _log(self, run: Run, seconds: float) -> None:
        speeds = self._per_second(seconds)
        if self._per_sample:
            speeds["flops_per_sec"] = speeds["samples_per_sec"] * self._per_sample
        figures = {}
        for name, value in speeds.items():
            if value:
                figures[f"device/{name}"] = value / (
                    1 if name == "batches_per_sec" else run.plan.layout.devices_per_process
                )
                figures[f"global/{name}"] = value * run.world.data_size
        if self._peak and "flops_per_sec" in speeds:
            figures["device/mfu"] = speeds["flops_per_sec"] / self._peak
        for name, value in figures.items():
            run.log(name, value, on_step=True, on_epoch=False, batch_size=1)


def _wait(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    torch.zeros((), device=device).item()


def _known_peak(run: Run) -> float | None:
    if run.device.type != "cuda" or run.plan.precision.name not in _HALF:
        return None
    name = torch.cuda.get_device_name(run.device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
