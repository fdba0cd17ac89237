"""The plugin ``progress_lines``: plain lines of progress, without a bar."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence

from geartrain.hookspecs import hookimpl
from geartrain.loop.run import Run

#: The fewest seconds from one line to the next.
SECONDS_A_LINE = 30.0


class ProgressLines:
    """Prints rank 0's progress on standard error, and the final metrics on standard output.

    ``enable_progress_bar=True`` selects it if no plugin ``progress`` is installed.
    """

    errors_are_warnings = True
    shows_progress = True

    def __init__(self) -> None:
        self._run_began = self._began = self._validation_began = 0.0
        self._first_step = 0
        #: The time of the next line. Each step compares the clock with it.
        self._due = math.inf
        self._said = -math.inf

    @hookimpl
    def on_run_start(self) -> None:
        self._run_began, self._due, self._said = time.monotonic(), math.inf, -math.inf

    @hookimpl
    def on_epoch_start(self, run: Run) -> None:
        self._began, self._first_step = time.monotonic(), run.step
        self._due = self._began + SECONDS_A_LINE

    @hookimpl
    def on_step_end(self, run: Run) -> None:
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + SECONDS_A_LINE
            total = run.stages["train"].batches[0]
            done = f"{run.batch_idx}/{total}" if total is not None else str(run.batch_idx)
            message = f"{_epoch(run)}: {done} batches"
            self._say(run, [message, self._steps_a_second(run), _text(run.logs.prog_bar)])

    @hookimpl
    def on_epoch_end(self, run: Run) -> None:
        self._due = math.inf
        metrics = _text({**run.logs.prog_bar, **run.logs.logged})
        self._say(run, [f"{_epoch(run)}: step {run.step}", self._steps_a_second(run), metrics])

    @hookimpl
    def on_validation_start(self) -> None:
        self._validation_began = time.monotonic()

    @hookimpl
    def on_validation_end(self, run: Run) -> None:
        seconds = time.monotonic() - self._validation_began
        self._began += seconds  # the rate of an epoch is without its validations
        if run.command == run.stage:
            counts = run.current_stage.batches
            facts, total = [], sum(count or 0 for count in counts)
            if None not in counts:
                facts = [f"{total} batches", f"{total / max(seconds, 1e-9):.1f} batches/s"]
            facts.append(_text({**run.logs.prog_bar, **run.logs.logged}))
            self._say(run, [f"{run.stage}: {', '.join(facts)}"])

    @hookimpl
    def on_run_end(self, run: Run) -> None:
        if run.world.rank or run.command == "predict":
            return
        done = f"{run.step} steps, {run.epoch} epochs, " if run.command == "fit" else ""
        print(f"{run.command}: {done}{time.monotonic() - self._run_began:.1f} s")
        width = max(map(len, run.metrics), default=0)
        for name, value in sorted(run.metrics.items()):
            print(f"{name:{width}}  {value:.6g}")

    def _steps_a_second(self, run: Run) -> str:
        seconds = max(time.monotonic() - self._began, 1e-9)
        return f"{(run.step - self._first_step) / seconds:.1f} steps/s"

    def _say(self, run: Run, facts: Sequence[str]) -> None:
        current = time.monotonic()
        if run.world.rank == 0 and current - self._said >= SECONDS_A_LINE:
            self._said = current
            print(", ".join(filter(None, facts)), file=sys.stderr, flush=True)


def _epoch(run: Run) -> str:
    last = run.plan.options.max_epochs
    return f"epoch {run.epoch + 1}" + (f"/{last}" if last > 0 else "")


def _text(metrics: Mapping[str, float]) -> str:
    return " ".join(f"{name}={value:.4g}" for name, value in metrics.items())
