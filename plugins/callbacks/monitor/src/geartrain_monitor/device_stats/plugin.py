"""The plugin ``device_stats``."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from geartrain import UsageError, hookimpl
from geartrain.plugin_api import MappedBatches, warn
from geartrain_monitor.device_stats.cpu import SHORTEST
from geartrain_monitor.device_stats.monitor import PATIENCE, Monitor

if TYPE_CHECKING:
    from geartrain import Run


class DeviceStats:
    """Pass values of the devices and the CPU to the loggers.

    A thread on each node's first rank calls every ``device_stats`` hook every ``interval`` seconds.
    Rank 0 logs the newest sample between two batches; the first sample is logged at the end of the
    first epoch or evaluation at the latest.

    Loggers get the values by ``log_metrics``. ``run.log`` would add a dozen values per device to
    the module's metrics: in the progress line, the final table and ``trainer.callback_metrics``.

    Args:
        interval: seconds between two samples, at least 0.1.
        cpu_stats: also log the CPU's values and the memory; ``None``: only without another device.

    Raises:
        UsageError: an option is wrong.
    """

    def __init__(self, interval: float = 5.0, cpu_stats: bool | None = True) -> None:
        number = isinstance(interval, int | float) and not isinstance(interval, bool)
        if not number or not SHORTEST <= interval <= threading.TIMEOUT_MAX:
            raise UsageError(
                f"geartrain-monitor[device_stats]: interval={interval!r} is not a number of "
                f"seconds, at least {SHORTEST}. Fix: leave it out (5.0), or a longer one"
            )
        if cpu_stats not in (True, False, None):
            message = f"geartrain-monitor[device_stats]: cpu_stats={cpu_stats!r}"
            raise UsageError(f"{message}. Fix: True, False or None")
        self.interval, self.cpu_stats = float(interval), cpu_stats
        self._monitor: Monitor | None = None

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        self._stop()
        world, nodes = run.world, run.plan.num_nodes
        if world.rank == 0:
            if not run.hooks.implementers("log_metrics") and not run.plan.options.fast_dev_run:
                _warn(
                    "device_stats: no logger is selected, so its figures are not written. "
                    "Fix: --output DIR, or a logger's plugin"
                )
            if nodes > 1 and run.store is None:
                _warn(
                    f"device_stats: {run.plan.strategy.label} has no store that every rank "
                    "reaches, so only node 0's figures are logged"
                )
        if world.local_rank == 0 and (world.rank == 0 or run.store is not None):
            wanted, on_cpu = self.cpu_stats, run.plan.accelerator.name == "cpu"
            self._monitor = Monitor(run, self.interval, on_cpu if wanted is None else wanted)
            self._monitor.start()

    @hookimpl
    def device_stats(self) -> dict[str, float] | None:
        cpu = self._monitor.cpu if self._monitor is not None else None
        return cpu.figures() if cpu is not None else None

    @hookimpl(wrapper=True)
    def device_batches(
        self, run: Run, loader: Iterable[Any]
    ) -> Generator[None, Any, Iterator[Any]]:
        """Look for a sample between two batches. ``on_step_end`` would cost 1 µs a step."""
        batches: Iterator[Any] = yield
        monitor = self._monitor
        if monitor is None:
            return batches
        figures, notes = monitor.figures, monitor.notes

        def look(batch: Any) -> Any:
            if figures or notes:
                _report(run, monitor)
            return batch

        return MappedBatches(batches, loader, look)

    @hookimpl(optionalhook=True)  # a Session fires neither event
    def on_validation_end(self, run: Run) -> None:
        if run.stage != "sanity_check":
            self._log_at_the_latest(run)

    @hookimpl(optionalhook=True)
    def on_epoch_end(self, run: Run) -> None:
        self._log_at_the_latest(run)

    @hookimpl(wrapper=True)
    def teardown_device(self) -> Generator[None, Any, Any]:
        """Stop the thread before the device is released; this hook runs even after an error."""
        self._stop()
        return (yield)

    def _log_at_the_latest(self, run: Run) -> None:
        if self._monitor is not None:
            self._monitor.first()
            _report(run, self._monitor)

    def _stop(self) -> None:
        monitor = self._monitor
        if monitor is not None and not monitor.stop():
            _warn(
                f"device_stats: its thread did not end within {PATIENCE:.0f} s; "
                "it ends with the program"
            )
        self._monitor = None


def _report(run: Run, monitor: Monitor) -> None:
    """Print and log the monitor's news in the training thread, where loggers expect their calls."""
    while monitor.notes:
        _warn(monitor.notes.popleft())
    if monitor.figures and run.stage != "sanity_check":
        figures = monitor.figures.pop()
        run.hooks.log_metrics(run=run, metrics=figures, step=run.step)


def _warn(text: str) -> None:
    warn(text)
