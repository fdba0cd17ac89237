"""Write metrics to a text file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from geartrain import Run, UsageError, hookimpl


class MineLogger:
    """Writes a line to a file in the run's folder each time metrics are logged.

    Args:
        name: the file's name.

    Raises:
        UsageError: ``name`` is empty or has a folder.
    """

    #: An error here, such as a full disk, becomes a warning: training goes on.
    errors_are_warnings = True

    def __init__(self, name: str = "mine.txt") -> None:
        if not name or Path(name).name != name:
            raise UsageError(f"name={name!r} must be the name of a file.")
        self.name = name

    # Only rank 0 is called.
    @hookimpl
    def log_metrics(self, run: Run, metrics: Mapping[str, float], step: int) -> None:
        if run.plan.output is None or run.plan.options.fast_dev_run:
            return
        with Path(run.plan.output, self.name).open("a", encoding="utf-8") as file:
            file.write(f"{run.stage} {step} {dict(metrics)}\n")
