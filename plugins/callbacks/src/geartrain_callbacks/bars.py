"""Displays drawn by rich: bars on a terminal, one output in a notebook."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from geartrain_callbacks.lines import Count, Lines, metrics_text

#: The fewest seconds between two drawings; a faster bar is unreadable.
_SECONDS_A_DRAWING = 0.1
#: Drawing takes at most 1/300 of the time: slow drawings are made less often.
_PART_OF_TIME = 300
#: The most seconds between two drawings, however slow the terminal is.
_LONGEST_PAUSE = 1.0
#: On a terminal with fewer columns, show numbers without a bar.
_NARROW = 60


class _Bars:
    """One bar per count. Unused bars are hidden; rich would add a new bar at another place."""

    def __init__(self, console: Console, redirect_stdout: bool = False) -> None:
        self.pause = _SECONDS_A_DRAWING
        # Each bar is one line: rich cannot redraw a bar that wraps. The last column is cut with
        # dots if there is no room.
        title, count, rate, left = (
            TextColumn(text, markup=False, table_column=Column(no_wrap=True))
            for text in (
                "{task.description}",
                "{task.fields[count]}",
                "{task.fields[rate]}",
                "{task.fields[left]}",
            )
        )
        rest = TextColumn(
            "{task.fields[metrics]}",
            markup=False,
            table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
        )
        bar = BarColumn(bar_width=min(40, console.width // 4))
        narrow = console.width < _NARROW
        self._progress = Progress(
            *((title, count, rest) if narrow else (title, bar, count, rate, left, rest)),
            expand=True,
            console=console,
            # rich's refresh thread would compete with the loop for the GIL ten times a second.
            auto_refresh=False,
            redirect_stdout=redirect_stdout,
        )
        self._tasks = [
            self._progress.add_task("", visible=False, count="", rate="", left="", metrics="")
            for _ in range(2)
        ]

    def show(self, counts: Sequence[Count], metrics: dict[str, float]) -> None:
        began = time.monotonic()
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
                metrics="" if i else metrics_text(metrics),
            )
        self._draw()
        self.pause = min(
            max(_SECONDS_A_DRAWING, (time.monotonic() - began) * _PART_OF_TIME), _LONGEST_PAUSE
        )

    def _draw(self) -> None:
        raise NotImplementedError


class Terminal(_Bars):
    """Bars that are redrawn in place. Output of the program appears above them."""

    def __init__(self, console: Console) -> None:
        # rich sends redirected output to the terminal, so a file or pipe is not redirected.
        super().__init__(console, redirect_stdout=sys.stdout.isatty())
        self._progress.start()

    def _draw(self) -> None:
        self._progress.refresh()

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
