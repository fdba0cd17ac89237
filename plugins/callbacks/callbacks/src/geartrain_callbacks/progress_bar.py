"""``progress``: progress on the terminal or in the notebook, and the final table."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from geartrain import Run, UsageError, hookimpl
from geartrain.plugin_api import ClusterEnvironment, MappedBatches, warn
from geartrain_callbacks.callback import PluginCallback
from geartrain_callbacks.headlines import BestEpoch, header, places
from geartrain_callbacks.lines import Count, EpochLine, Lines, metrics_text
from geartrain_callbacks.progress_names import ProgressNames

if TYPE_CHECKING:
    from geartrain_callbacks.bars import Display


class ProgressBar(ProgressNames, PluginCallback):
    """Show rank 0's progress on standard error, and how a run ended on standard output.

    A ``fit`` begins with its module and devices, and ends with the place of its files.

    Errors of the display never stop a run. ``enable_progress_bar=True`` selects this plugin. rich
    is imported on rank 0 only, because the import takes 0.1 s.
    """

    shows_progress = True
    #: How the user gives a run a folder; the command line has another form.
    output_option = 'output="DIR"'

    def __init__(self) -> None:
        self._display: Display | None = None
        self._best: BestEpoch | None = None
        #: Active counts, outermost first: an epoch, and an evaluation inside it.
        self._counts: list[Count] = []
        #: The time of the next drawing. A step costs one comparison with it.
        self._due = math.inf
        #: The sum over all loaders of an evaluation.
        self._whole = Count("", None, 0.0)
        self._started, self._first_step = 0.0, 0

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        self._run = run
        self._counts, self._due, self._started = [], math.inf, time.monotonic()
        if run.world.rank == 0:
            with self._harmless():
                if run.command == "fit":
                    print(header(run), file=sys.stderr, flush=True)
                    self._best = BestEpoch(run)
                self._display = self._make_display()

    def _make_display(self) -> Display:
        from rich.console import Console

        from geartrain_callbacks.bars import display

        return display(Console(stderr=True))

    # --- training --------------------------------------------------------------------------------

    @hookimpl
    def on_epoch_start(self, run: Run) -> None:
        if self._display is not None:
            current = time.monotonic()
            self._counts = [Count(_epoch(run), _batches_in_epoch(run), current, "steps")]
            self._first_step = run.step
            self._due = current + self._display.pause

    @hookimpl
    def on_step_end(self, run: Run) -> None:
        if time.monotonic() >= self._due:
            self._count_epoch(run)
            self._show(run)

    @hookimpl
    def on_epoch_end(self, run: Run) -> None:
        if self._display is None or self.is_disabled:
            return
        self._count_epoch(run)
        shown = {**run.logs.prog_bar, **run.logs.logged}
        with self._harmless():
            is_best = self._best is not None and self._best.is_new(run)
            line = EpochLine(self._counts[0], run.step, shown, is_best)
            self._display.end_epoch(line, self.get_metrics(run.trainer, run.module))
        self._due = math.inf

    def _count_epoch(self, run: Run) -> None:
        self._counts[0].done, self._counts[0].steps = run.batch_idx, run.step - self._first_step

    # --- evaluation ------------------------------------------------------------------------------

    @hookimpl(specname="on_validation_start")
    def _on_validation_start(self, run: Run) -> None:
        if self._display is not None:
            self._whole = Count(run.stage, None, time.monotonic())
            if self._counts:
                self._count_epoch(run)
                self._counts[0].paused = self._whole.began

    @hookimpl(wrapper=True)
    def device_batches(
        self, run: Run, loader: Iterable[Any]
    ) -> Generator[None, Iterator[Any], Iterator[Any]]:
        """Count the batches that an evaluation takes; the loop itself counts training steps."""
        batches = yield
        if self._display is None or run.stage == "train":
            return batches
        self._end_loader()
        count = Count(_evaluation(run), _batches_to_evaluate(run), time.monotonic())
        self._counts.append(count)
        if isinstance(self._display, Lines):
            self._due = count.began + self._display.pause
        else:
            self._show(run)

        def taken(batch: Any) -> Any:
            if time.monotonic() >= self._due:
                self._show(run)
            count.done += 1  # this batch is not done yet, so it is not shown
            return batch

        return MappedBatches(batches, loader, taken)

    @hookimpl(specname="on_validation_end")
    def _on_validation_end(self, run: Run) -> None:
        if self._display is None:
            return
        asked_for, draws = run.command == run.stage, not isinstance(self._display, Lines)
        if asked_for and draws:
            self._show(run)
        self._end_loader()
        if asked_for and isinstance(self._display, Lines):
            shown = {**run.logs.prog_bar, **run.logs.logged}
            with self._harmless():
                self._display.say(
                    [
                        f"{run.stage}: {self._whole.batches()} batches",
                        self._whole.rate(),
                        metrics_text(shown),
                    ]
                )
        if self._counts:
            self._counts[0].resume()
        if not asked_for and draws:
            self._show(run)

    def _end_loader(self) -> None:
        if self._counts and self._counts[-1].unit == "batches":
            self._whole.done += self._counts.pop().done

    # --- end of the run --------------------------------------------------------------------------

    @hookimpl(wrapper=True)
    def launch(self, run: Run) -> Generator[None, Any, Any]:
        """After a ``fit`` on all ranks, also of another process, say where its files are."""
        result = yield
        cluster, nodes = run.trainer.cluster, run.plan.num_nodes
        is_first = run.world.rank == 0 and ClusterEnvironment.starts_rank_0(cluster, nodes)
        if run.command == "fit" and is_first:
            with self._harmless():
                print(*places(run, self.output_option), sep="\n", flush=True)
        return result

    @hookimpl
    def on_run_end(self, run: Run) -> None:
        self._stop()
        if run.world.rank == 0 and run.command != "predict":
            with self._harmless():
                self._table(run)

    @hookimpl(wrapper=True, specname="on_exception")
    def _on_exception(self) -> Generator[None, Any, Any]:
        self._stop()  # before other plugins: if one raises, the terminal would have no cursor
        return (yield)

    def _show(self, run: Run) -> None:
        if self._display is not None and self.is_enabled:
            with self._harmless():
                metrics = self.get_metrics(run.trainer, run.module)
                self._display.show(self._counts, metrics)
        self._due = math.inf if self._display is None else time.monotonic() + self._display.pause

    def _stop(self) -> None:
        shown, self._display, self._due = self._display, None, math.inf
        if shown is not None:
            with suppress(Exception):
                shown.stop()

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        """Show nothing more after an error. Do not warn if the terminal is gone."""
        try:
            yield
        except Exception as error:
            self._stop()
            if not isinstance(error, OSError):
                warn(
                    f"geartrain-callbacks[progress]: {type(error).__name__}: {error}. "
                    "The run continues without it."
                )

    def _table(self, run: Run) -> None:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table("metric", "value")
        for name, value in sorted(run.metrics.items()):
            table.add_row(Text(name), f"{value:.6g}")  # Text: brackets in a name are not markup
        console = Console()
        facts = [f"{time.monotonic() - self._started:.1f} s"]
        if run.command == "fit":
            best = self._best.text() if self._best else ""
            facts = [f"{run.step} steps", f"{run.epoch} epochs", *facts, best]
        closing = f"{run.command}: {', '.join(filter(None, facts))}"
        console.print(Text(closing), soft_wrap=True)
        if run.metrics:
            console.print(table)


class ProgressLines(ProgressBar):
    """Show progress as plain lines on a terminal too."""

    def _make_display(self) -> Display:
        return Lines()


def _epoch(run: Run) -> str:
    last = run.plan.options.max_epochs
    return f"epoch {run.epoch + 1}" + (f"/{last}" if last > 0 else "")


def _evaluation(run: Run) -> str:
    """Return the evaluation's name, with the loader's number if it has several loaders."""
    loaders = len(run.current_stage.loaders)
    return run.stage.replace("_", " ") + (
        f" {run.dataloader_idx + 1}/{loaders}" if loaders > 1 else ""
    )


def _batches_in_epoch(run: Run) -> int | None:
    """Return the batches until the epoch or the training ends."""
    options, total = run.plan.options, run.stages["train"].batches[0]
    if options.max_steps == -1:
        return total
    last = (options.max_steps - run.step) * options.accumulate_grad_batches
    return last if total is None else min(total, last)


def _batches_to_evaluate(run: Run) -> int | None:
    total = run.current_stage.batches[run.dataloader_idx]
    limit = run.plan.options.num_sanity_val_steps
    if run.stage != "sanity_check" or limit == -1:
        return total
    return limit if total is None else min(total, limit)


class RichProgressBar(ProgressBar):
    """The progress bar with PyTorch Lightning's name and options.

    Args:
        refresh_rate: 0 turns the bar off; it is drawn at most ten times a second.
        leave: accepted; finished epochs always stay.

    Raises:
        UsageError: ``refresh_rate`` is no number of batches.
    """

    def __init__(self, refresh_rate: int = 1, leave: bool = False) -> None:
        super().__init__()
        if type(refresh_rate) is not int or refresh_rate < 0:
            message = f"geartrain-callbacks[progress]: refresh_rate={refresh_rate!r}"
            raise UsageError(f"{message}. Fix: a number of batches, or 0 for no bar")
        self.refresh_rate, self.leave = refresh_rate, leave


class TQDMProgressBar(RichProgressBar):
    """The same bar under the name of PyTorch Lightning's other one."""
