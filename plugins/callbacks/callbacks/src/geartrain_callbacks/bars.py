"""Displays drawn by rich: bars on a terminal, one output in a notebook."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from geartrain_callbacks.lines import Count, EpochLine, Lines, metrics_text

#: The fewest seconds between two drawings; a faster bar is unreadable.
_SECONDS_A_DRAWING = 0.1
#: Drawing takes at most 1/300 of the time: slow drawings are made less often.
_PART_OF_TIME = 300
#: The most seconds between two drawings, however slow the terminal is.
_LONGEST_PAUSE = 1.0
#: Columns that a rate and a remaining time take.
_RATE, _LEFT = 14, 12
#: Columns that are kept for metrics on a narrow terminal: two short ones.
_METRICS = 36
#: The fewest and the most columns of a bar.
_SHORTEST, _LONGEST = 5, 40


class _Metrics:
    """Metrics in one line. Leave out whole metrics, the last first: a cut number is wrong."""

    def __init__(self, metrics: dict[str, float]) -> None:
        self._texts = [metrics_text({name: value}) for name, value in metrics.items()]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(0, cell_len(" ".join(self._texts)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.fit(options.max_width), no_wrap=True, overflow="crop")

    def fit(self, room: int) -> str:
        """Return the metrics that fit into ``room`` columns, and dots for the others."""
        for count in range(len(self._texts), 0, -1):
            dots = " …" if count < len(self._texts) else ""
            line = " ".join(self._texts[:count]) + dots
            if cell_len(line) <= room:
                return line
        if not self._texts:
            return ""
        name, _, value = self._texts[0].rpartition("=")
        room -= cell_len(f"…={value}")
        return f"{set_cell_size(name, room)}…={value}" if room > 0 else "…"


class _Rest(ProgressColumn):
    """The last column: it takes all columns that the others leave."""

    def __init__(self) -> None:
        super().__init__(Column(no_wrap=True, ratio=1))

    def render(self, task: Task) -> _Metrics:
        return task.fields["metrics"]  # type: ignore[no-any-return]


class _Bars:
    """One bar per count. Unused bars are hidden; rich would add a new bar at another place."""

    def __init__(self, console: Console, redirect_stdout: bool = False) -> None:
        self.pause = _SECONDS_A_DRAWING
        # Each bar is one line: rich cannot redraw a bar that wraps.
        self._title, self._count, self._rate, self._left = (
            TextColumn(text, markup=False, table_column=Column(no_wrap=True))
            for text in (
                "{task.description}",
                "{task.fields[count]}",
                "{task.fields[rate]}",
                "{task.fields[left]}",
            )
        )
        self._bar, self._rest = BarColumn(), _Rest()
        self._progress = Progress(
            expand=True,
            console=console,
            # rich's refresh thread would compete with the loop for the GIL ten times a second.
            auto_refresh=False,
            redirect_stdout=redirect_stdout,
        )
        self._tasks = [
            self._progress.add_task(
                "", visible=False, count="", rate="", left="", metrics=_Metrics({})
            )
            for _ in range(2)
        ]

    def show(self, counts: Sequence[Count], metrics: dict[str, float]) -> None:
        began = time.monotonic()
        self._progress.columns = self._columns(counts, metrics)
        for i, task in enumerate(self._tasks):
            if i >= len(counts):
                self._progress.update(task, visible=False)
                continue
            count = counts[i]
            self._progress.update(
                task,
                visible=True,
                total=count.total,
                completed=count.done,
                description=count.title,
                count=count.batches(),
                rate=count.rate(),
                left=count.left(),
                metrics=_Metrics({} if i else metrics),
            )
        self._draw()
        self.pause = min(
            max(_SECONDS_A_DRAWING, (time.monotonic() - began) * _PART_OF_TIME), _LONGEST_PAUSE
        )

    def end_epoch(self, line: EpochLine, prog_bar: dict[str, float]) -> None:
        """Show an epoch that has ended; see :meth:`geartrain_callbacks.lines.Lines.end_epoch`."""
        self.show([line.count], prog_bar)

    def _columns(
        self, counts: Sequence[Count], metrics: dict[str, float]
    ) -> tuple[ProgressColumn, ...]:
        """Return the columns for the present width of the terminal.

        Nearly half of the width is for metrics. Their names decide and not their values, so that
        the columns do not jump.
        """
        width = self._progress.console.width
        needs = [cell_len(name) + len("=-1.234e-05 ") for name in metrics]
        room = width - max(*needs[:1], min(sum(needs), max(_METRICS, width * 45 // 100)), 0)
        room -= max((cell_len(count.title) for count in counts), default=0) + 1
        room -= (
            max((2 * len(str(count.total or count.done)) + 1 for count in counts), default=0) + 1
        )
        rate = room > _RATE
        room -= (_RATE + 1) * rate
        bar = room > _SHORTEST
        remaining = room > _SHORTEST + _LEFT + 1
        self._bar.bar_width = min(_LONGEST, room - 1 - (_LEFT + 1) * remaining, width // 4)
        shown = (True, bar, True, rate, remaining, True)
        every = (self._title, self._bar, self._count, self._rate, self._left, self._rest)
        return tuple(column for column, is_shown in zip(every, shown, strict=True) if is_shown)

    def _draw(self) -> None:
        raise NotImplementedError


class Terminal(_Bars):
    """Bars that are redrawn in place. Output of the program appears above them."""

    def __init__(self, console: Console) -> None:
        # rich sends redirected output to the terminal, so a file or pipe is not redirected.
        super().__init__(console, redirect_stdout=sys.stdout.isatty())
        self._width, self._height = console.width, 1
        #: The line to print above the bars in the next drawing.
        self._above: Text | None = None
        self._progress.start()

    def show(self, counts: Sequence[Count], metrics: dict[str, float]) -> None:
        width = self._progress.console.width
        if width < self._width:
            self._remove_wrapped(width)
        super().show(counts, metrics)
        self._width, self._height = width, max(1, len(counts))

    def _remove_wrapped(self, width: int) -> None:
        """Remove bars that the terminal wrapped when it became narrower.

        rich then finds the cursor in the line of the last bar, as it left it.
        """
        rows = self._height * -(-self._width // width)
        console = self._progress.console
        up = f"\x1b[{rows - 1}A" if rows > 1 else ""
        console.file.write(f"\r{up}\x1b[J" + "\n" * (self._height - 1))
        console.file.flush()

    def end_epoch(self, line: EpochLine, prog_bar: dict[str, float]) -> None:
        """Print the epoch's line above the bars, where it stays."""
        before, after = line.parts()
        before += ", " * bool(line.metrics)
        room = self._progress.console.width - cell_len(before + after)
        text = before + _Metrics(line.metrics).fit(max(0, room)) + after
        style = "bold" if line.is_best else ""
        self._above = Text(text, style=style, no_wrap=True, overflow="crop")
        super().end_epoch(line, prog_bar)

    def _draw(self) -> None:
        above, self._above = self._above, None
        if above is None:
            self._progress.refresh()
        else:  # rich draws the bars again, below the line
            self._progress.console.print(above)

    def stop(self) -> None:
        self._progress.stop()


class Notebook(_Bars):
    """One output of a notebook cell, updated in place. rich's own display needs ipywidgets."""

    def __init__(self) -> None:
        super().__init__(
            Console(
                file=io.StringIO(),
                width=100,
                force_terminal=False,
                force_jupyter=False,
                color_system=None,
            )
        )
        self._handle: Any = None

    def _draw(self) -> None:
        with self._progress.console.capture() as drawn:
            self._progress.console.print(self._progress.get_renderable())
        text = {"text/plain": "\n".join(line.rstrip() for line in drawn.get().splitlines())}
        if self._handle is None:
            self._handle = import_module("IPython.display").display(text, raw=True, display_id=True)
        else:
            self._handle.update(text, raw=True)

    def stop(self) -> None:
        pass


Display = Lines | Terminal | Notebook


def display(console: Console) -> Display:
    """Return the display that fits the file to which ``console`` writes."""
    if console.is_jupyter:
        return Notebook()
        # rich treats FORCE_COLOR as a terminal; a log file must not get thousands of redrawn bars.
    if console.is_interactive and console.file.isatty():
        return Terminal(console)
    return Lines()
