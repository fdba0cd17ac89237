"""The plugin ``csv``: metrics as a table for spreadsheets and pandas."""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from geartrain import Plan, Run, TrainingError, UsageError, hookimpl
from geartrain.plugin_api import (
    AppendedFile,
    ClusterEnvironment,
    detect,
    remove_abandoned,
    replacing,
    user_path,
)

#: The first columns of every table; a metric with one of these names is called ``metric_NAME``.
COLUMNS = ("step", "epoch", "stage")


class CSVLogger:
    """Write a line of ``metrics.csv`` each time metrics are logged; only rank 0 writes.

    A new name becomes a new last column. The table is copied with the new header, and the copy
    replaces it, so a reader always finds a complete table. In a long table this copy takes time.

    A ``fit`` that resumes appends to the existing table.

    NaN and infinity are written ``nan``, ``inf`` and ``-inf``, as pandas reads them; a metric that
    was not logged is an empty cell.

    Args:
        path: the file; default ``metrics.csv`` in the run's folder. Several runs of the same
            object append to it.

    Raises:
        UsageError: neither ``path`` nor the run's folder is given, or the file exists.
    """

    errors_are_warnings = True

    def __init__(self, path: str | None = None) -> None:
        self.path = None if path is None else user_path(path, "geartrain-callbacks[csv]: path")
        self._began = False
        self._table: Table | None = None

    @hookimpl
    def check_plan(self, plan: Plan) -> None:
        if plan.options.fast_dev_run:
            return
        path = self.metrics_file(plan.output)
        if path is None:
            raise UsageError(
                "geartrain-callbacks[csv] has no file to write. "
                "Fix: --csv.path FILE, or a folder for the run (--output DIR)"
            )
        # Check only before the first run of this object, because later runs append to the file,
        # and only on rank 0, because a rank that starts later finds rank 0's table.
        first = ClusterEnvironment.starts_rank_0(detect(), plan.num_nodes)
        # The folder refuses an earlier run, unless that failed before it saved anything.
        of_run = self.path is None and (path.parent / "summary.json").exists()
        if first and not self._began and not plan.resumes and path.exists() and not of_run:
            raise UsageError(
                f"geartrain-callbacks[csv]: {str(path)!r} exists, and nothing is overwritten. "
                "Fix: use another path, or remove it"
            )
        self._began = True

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        self._close()
        path = self.metrics_file(run.plan.output)
        if run.world.rank == 0 and path is not None and not run.plan.options.fast_dev_run:
            self._began = True  # check_plan may have run in another process
            remove_abandoned(path.parent, path.name[1:])
            lines = path.parent / "metrics.jsonl"
            if self.path is None and (not lines.exists() or not lines.stat().st_size):
                path.unlink(missing_ok=True)  # of a run that failed early
            self._table = Table(path)

    @hookimpl
    def log_metrics(self, run: Run, metrics: Mapping[str, float], step: int) -> None:
        if self._table is not None:
            columns = {
                f"metric_{name}" if name in COLUMNS else name: value
                for name, value in metrics.items()
            }
            self._table.add({"step": step, "epoch": run.epoch, "stage": run.stage, **columns})

    @hookimpl
    def on_run_end(self) -> None:
        self._close()

    @hookimpl
    def on_exception(self) -> None:
        self._close()

    def metrics_file(self, output: Path | None) -> Path | None:
        """Return the file, for a run with this folder; ``None`` if there is none."""
        if self.path is not None:
            return self.path
        return None if output is None else output / "metrics.csv"

    def appended_files(self) -> dict[Path, int]:
        """Return the table and its rows: its size changes with each new column.

        If the rank dies and starts again, the strategy ``elastic`` calls :meth:`cut` with them.
        """
        return {} if self._table is None else {self._table.path: self._table.rows}

    def cut(self, path: Path, rows: int) -> None:
        """Remove the rows of a table after so many; its columns stay."""
        with path.open(encoding="utf-8", newline="") as file:
            head = sum(len(line(columns)) for columns in islice(csv.reader(file), 1))
        with path.open("r+b") as table:
            table.seek(head)
            for _ in range(rows):
                table.readline()
            table.truncate()

    def _close(self) -> None:
        table, self._table = self._table, None
        if table is not None:
            table.close()


class Table:
    """A CSV file that can get new lines and new columns.

    Args:
        path: created if it does not exist; otherwise lines are appended.

    Raises:
        OSError: the folder cannot be created.
        TrainingError: the file cannot be opened, or it is not a table of metrics.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        #: Rows in the file, without the header.
        self.rows = 0
        self._columns: list[str] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            with path.open(encoding="utf-8", newline="") as file:
                reader = csv.reader(file)
                self._columns = next(reader)
                self.rows = sum(1 for _ in reader)
            if tuple(self._columns[: len(COLUMNS)]) != COLUMNS:
                raise TrainingError(
                    f"{path} is not a table of metrics: "
                    f"its columns are {', '.join(self._columns[:5])}"
                )
        self._file = AppendedFile(path)

    def add(self, row: Mapping[str, Any]) -> None:
        """Write one line, whole or not at all, before this returns.

        Raises:
            TrainingError: the disk is full; the file is unchanged.
        """
        columns = [*self._columns, *(name for name in row if name not in self._columns)]
        if not self._columns:
            self._file.append(line(columns))
        elif len(columns) > len(self._columns):
            self._add_columns(columns)
        self._columns = columns
        self._file.append(line(row.get(name, "") for name in columns))
        self.rows += 1

    def close(self) -> None:
        self._file.close()

    def _add_columns(self, columns: list[str]) -> None:
        """Copy the table with a new header; old lines get empty cells at their ends."""
        old, more = len(line(self._columns)), b"," * (len(columns) - len(self._columns)) + b"\n"
        try:
            with replacing(self.path) as target:
                target.write(line(columns))
                with self.path.open("rb") as source:
                    source.seek(old)
                    # Values are numbers and stages, so only names may contain a line break.
                    for text in source:
                        target.write(text[:-1] + more)
                shutil.copymode(self.path, target.name)
                self._file.close()  # first, because Windows does not replace an open file
        finally:
            self._file.close()
            self._file = AppendedFile(self.path)


def line(cells: Iterable[Any]) -> bytes:
    """Return one line of a CSV file, with its line break."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()
