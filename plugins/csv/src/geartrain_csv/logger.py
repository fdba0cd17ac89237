"""The plugin ``csv``: metrics as a table that every spreadsheet and pandas read."""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from geartrain import Plan, Run, TrainingError, UsageError, hookimpl
from geartrain.plugin_api import AppendedFile, detect, replacing, starts_rank_0, user_path

#: The columns that every table begins with; a metric of one of these names is called ``metric_NAME``.
COLUMNS = ("step", "epoch", "stage")
#: Bytes up to which a table is always written anew for a new column.
SMALL = 16 * 2**20


class CSVLogger:
    """Writes a line of ``metrics.csv`` each time that metrics are logged; rank 0 writes.

    A name that was not there before becomes a new last column. The table is then written anew beside itself and takes its own place, so
    that whoever reads it finds a whole one, old or new. One that is larger than 16 MiB and has not doubled since is not written anew:
    the lines go on in ``metrics.2.csv``, with all columns. So no more than about twice a table's length is ever copied.

    A ``fit`` that resumes goes on in the table that is there.

    NaN and infinity are written ``nan``, ``inf`` and ``-inf``, as pandas reads them; a metric that was not logged is an empty cell.

    Args:
        path: the file; default ``metrics.csv`` in the run's folder. Several runs of one object go on in it.

    Raises:
        UsageError: there is neither ``path`` nor the run's folder, or the file is there already.
    """

    errors_are_warnings = True

    def __init__(self, path: str | None = None) -> None:
        self.path = None if path is None else user_path(path, "geartrain-csv[csv]: path")
        self._began = False
        self._table: Table | None = None

    @hookimpl
    def check_plan(self, plan: Plan) -> None:
        if plan.options.fast_dev_run:
            return
        path = self._path(plan)
        if path is None:
            raise UsageError("geartrain-csv[csv] has no place to write. Fix: --csv.path FILE, or a folder for the run (--output DIR)")
        # Only what this object finds at first: a later run of its goes on in the file that the first one began.
        # Rank 0 writes it: a rank that comes later, to a run that goes on, finds the table that rank 0 began.
        first = starts_rank_0(detect(), plan.num_nodes)
        if first and not self._began and not plan.resumes and path.exists():
            raise UsageError(
                f"geartrain-csv[csv]: {str(path)!r} is there already, and nothing is overwritten. Fix: another path, or remove it"
            )
        self._began = True

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        self._close()
        path = self._path(run.plan)
        if run.world.rank == 0 and path is not None and not run.plan.options.fast_dev_run:
            self._began = True  # another process may have asked check_plan, and gets this back
            self._table = Table(path)

    @hookimpl
    def log_metrics(self, run: Run, metrics: Mapping[str, float], step: int) -> None:
        if self._table is not None:
            own = {f"metric_{name}" if name in COLUMNS else name: value for name, value in metrics.items()}
            self._table.add({"step": step, "epoch": run.epoch, "stage": run.stage, **own})

    @hookimpl
    def on_run_end(self) -> None:
        self._close()

    @hookimpl
    def on_exception(self) -> None:
        self._close()

    def _path(self, plan: Plan) -> Path | None:
        if self.path is not None:
            return self.path
        return None if plan.output is None else plan.output / "metrics.csv"

    def _close(self) -> None:
        table, self._table = self._table, None
        if table is not None:
            table.close()


class Table:
    """A CSV file to which lines are added, and columns too.

    Args:
        path: created if it does not exist; lines are added to an existing table.

    Raises:
        OSError: its folder cannot be created.
        TrainingError: it cannot be opened, or there is a file of another kind.
    """

    def __init__(self, path: Path) -> None:
        self._first, self._number = path, 1
        self._open()

    def add(self, row: Mapping[str, Any]) -> None:
        """Write one line, whole or not at all, before this returns.

        Raises:
            TrainingError: the disk is full; the file is as it was.
        """
        new = [name for name in row if name not in self._columns]
        if new and not self._columns:
            self._begin(new)
        elif new and (self._file.size <= SMALL or self._file.size >= 2 * self._written_anew):
            self._write_anew([*self._columns, *new])
        elif new:
            self._next([*self._columns, *new])
        self._file.append(line(row.get(name, "") for name in self._columns))

    def close(self) -> None:
        self._file.close()

    # --- files -----------------------------------------------------------------------------------------------------------

    def _path(self) -> Path:
        return self._first if self._number == 1 else self._first.with_suffix(f".{self._number}{self._first.suffix}")

    def _open(self) -> None:
        self._first.parent.mkdir(parents=True, exist_ok=True)
        while True:  # the last one that there is
            self._number += 1
            if not self._path().exists():
                self._number -= 1
                break
        self._columns: list[str] = []
        path = self._path()
        if path.exists() and path.stat().st_size:
            with path.open(encoding="utf-8", newline="") as file:
                self._columns = next(csv.reader(file))
            if tuple(self._columns[: len(COLUMNS)]) != COLUMNS:
                raise TrainingError(f"{path} is not a table of metrics: its columns are {', '.join(self._columns[:5])}")
        self._reopen()
        # How long it was when it was written anew last is not known, so it counts as just written.
        self._written_anew = self._file.size

    def _reopen(self) -> None:
        self._file = AppendedFile(self._path())

    # --- columns ---------------------------------------------------------------------------------------------------------

    def _begin(self, columns: list[str]) -> None:
        self._file.append(line(columns))
        self._columns, self._written_anew = columns, 0

    def _write_anew(self, columns: list[str]) -> None:
        """Copy the lines under a new header, with empty cells at their ends."""
        path = self._path()
        old, more = len(line(self._columns)), b"," * (len(columns) - len(self._columns)) + b"\n"
        try:
            with replacing(path) as target:
                target.write(line(columns))
                with path.open("rb") as source:
                    source.seek(old)
                    for text in source:  # only names may hold a line's end: values are numbers and stages
                        target.write(text[:-1] + more)
                shutil.copymode(path, target.name)
                self._file.close()  # before it is replaced, which Windows would refuse
        finally:
            self._file.close()
            self._reopen()
        self._columns, self._written_anew = columns, self._file.size

    def _next(self, columns: list[str]) -> None:
        """Go on in a file of its own, because this one is too long to be written anew."""
        self._file.close()
        self._number += 1
        self._reopen()
        self._begin(columns)


def line(cells: Iterable[Any]) -> bytes:
    """One line of a CSV file, its end included."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()
