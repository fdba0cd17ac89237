"""The plugin ``device_stats``."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from geartrain import UsageError, hookimpl
from geartrain.plugin_api import Through
from geartrain_device_stats.cpu import SHORTEST
from geartrain_device_stats.monitor import PATIENCE, Monitor

if TYPE_CHECKING:
    from geartrain import Run


class DeviceStats:
    """Hands figures of the devices and of the CPU to the loggers.

    A thread on each node's first rank asks every ``device_stats`` hook once in ``interval`` seconds; rank 0 logs the newest sample
    between two batches, and the first one at the end of the first epoch or evaluation at the latest.

    Loggers get them by ``log_metrics``, and not by ``run.log``, which would put a dozen figures a device among the metrics of the
    module: into the progress line, the closing table and ``trainer.callback_metrics``.

    Args:
        interval: seconds between two samples, at least 0.1.

    Raises:
        UsageError: another ``interval``.
    """

    def __init__(self, interval: float = 5.0) -> None:
        number = isinstance(interval, int | float) and not isinstance(interval, bool)
        if not number or not SHORTEST <= interval <= threading.TIMEOUT_MAX:
            raise UsageError(
                f"geartrain-device-stats[device_stats]: interval={interval!r} is not a number of seconds, at least {SHORTEST}. "
                "Fix: leave it out (5.0), or a longer one"
            )
        self.interval = float(interval)
        self._monitor: Monitor | None = None

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        self._stop()
        world, nodes = run.world, run.plan.num_nodes
        if world.rank == 0:
            if not run.hooks.implementers("log_metrics") and not run.plan.options.fast_dev_run:
                _warn(
                    "device_stats: there is no logger, so nobody will see its figures. Fix: --output DIR, or a logger's plugin"
                )
            if nodes > 1 and run.store is None:
                _warn(
                    f"device_stats: {run.plan.strategy.label} has no store that every rank reaches, so only node 0's figures are logged"
                )
        if world.local_rank == 0 and (world.rank == 0 or run.store is not None):
            self._monitor = Monitor(run, self.interval)
            self._monitor.start()

    @hookimpl
    def device_stats(self) -> dict[str, float] | None:
        cpu = self._monitor.cpu if self._monitor is not None else None
        return cpu.figures() if cpu is not None else None

    @hookimpl(wrapper=True)
    def device_batches(
        self, run: Run, loader: Iterable[Any]
    ) -> Generator[None, Any, Iterator[Any]]:
        """Looks for a sample between two batches, in every stage. ``on_step_end`` would cost each step a hook call, 1 µs."""
        batches: Iterator[Any] = yield
        monitor = self._monitor
        if monitor is None:
            return batches
        figures, notes = monitor.figures, monitor.notes

        def look(batch: Any) -> Any:
            if figures or notes:
                _tell(run, monitor)
            return batch

        return Through(batches, loader, look)

    @hookimpl(optionalhook=True)  # a Session calls neither
    def on_validation_end(self, run: Run) -> None:
        if run.stage != "sanity_check":
            self._log_at_the_latest(run)

    @hookimpl(optionalhook=True)
    def on_epoch_end(self, run: Run) -> None:
        self._log_at_the_latest(run)

    @hookimpl(wrapper=True)
    def teardown_device(self) -> Generator[None, Any, Any]:
        """The one hook that always comes, also after an error; the thread must be gone before the device is."""
        self._stop()
        return (yield)

    def _log_at_the_latest(self, run: Run) -> None:
        if self._monitor is not None:
            self._monitor.first()
            _tell(run, self._monitor)

    def _stop(self) -> None:
        monitor = self._monitor
        if monitor is not None and not monitor.stop():
            _warn(
                f"device_stats: its thread did not end within {PATIENCE:.0f} s; it is left behind and ends with the program"
            )
        self._monitor = None


def _tell(run: Run, monitor: Monitor) -> None:
    """Print and log the monitor's news, in the thread that trains, in which loggers expect to be called."""
    while monitor.notes:
        _warn(monitor.notes.popleft())
    if monitor.figures and run.stage != "sanity_check":
        figures = monitor.figures.pop()
        run.hooks.log_metrics(run=run, metrics=figures, step=run.step)


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)
