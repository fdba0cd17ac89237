"""The progress bar and the closing table, drawn by rich: a bar on a terminal, one plain line an epoch elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from geartrain.hookspecs import hookimpl
from geartrain.run import Run

#: Seconds between redraws: a redraw costs milliseconds, more than a small step.
_REDRAW = 0.1


class ProgressBar:
    """Shows rank 0's progress on standard error and the closing table on standard output."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._drawn = self._started = 0.0
        self._epoch_started = (0.0, 0)

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        self._started = time.monotonic()
        if run.world.rank or run.command != "fit" or not self._console.is_terminal:
            return
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[metrics]}"),
            console=self._console,
            auto_refresh=False,  # rich's refresh thread would take the interpreter lock from the loop ten times a second
        )
        self._bar.start()
        self._task = self._bar.add_task("epoch 1", rate="", metrics="")

    @hookimpl
    def on_epoch_start(self, run: Run) -> None:
        self._epoch_started = time.monotonic(), run.step
        if self._bar is not None:
            total = run.batches["train"][0]
            self._bar.reset(self._task, total=total, description=_epoch(run))

    @hookimpl
    def on_step_end(self, run: Run) -> None:
        if self._bar is None or time.monotonic() - self._drawn < _REDRAW:
            return
        self._draw(run)

    @hookimpl
    def on_validation_start(self, run: Run) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=f"{_epoch(run)}, {run.stage.replace('_', ' ')}")
            self._bar.refresh()

    @hookimpl
    def on_epoch_end(self, run: Run) -> None:
        if self._bar is not None:
            self._draw(run)
        elif run.world.rank == 0:
            shown = {**run.logs.prog_bar, **run.logs.logged}
            self._console.print(f"{_epoch(run)}: step {run.step}, {self._rate(run)}, {_metrics(shown)}", highlight=False, soft_wrap=True)

    @hookimpl
    def on_run_end(self, run: Run) -> None:
        self._stop()
        if run.world.rank == 0 and run.command != "predict":
            self._table(run)

    @hookimpl
    def on_exception(self, run: Run) -> None:
        self._stop()

    def _draw(self, run: Run) -> None:
        assert self._bar is not None
        self._drawn = time.monotonic()
        self._bar.update(
            self._task, completed=run.batch_idx, description=_epoch(run), rate=self._rate(run), metrics=_metrics(run.logs.prog_bar)
        )
        self._bar.refresh()

    def _rate(self, run: Run) -> str:
        since, step = self._epoch_started
        return f"{(run.step - step) / max(time.monotonic() - since, 1e-9):.1f} steps/s"

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _table(self, run: Run) -> None:
        table = Table("metric", "value")
        for name, value in sorted(run.metrics.items()):
            table.add_row(name, f"{value:.6g}")
        console = Console()
        console.print(f"{run.command}: {run.step} steps, {run.epoch} epochs, {time.monotonic() - self._started:.1f} s", highlight=False)
        if run.metrics:
            console.print(table)


def _epoch(run: Run) -> str:
    last = run.plan.options.max_epochs
    return f"epoch {run.epoch + 1}" + (f"/{last}" if last > 0 else "")


def _metrics(values: dict[str, float]) -> str:
    return " ".join(f"{name}={value:.4g}" for name, value in values.items())
