"""The run's folder, ``output=DIR``: plan.json, metrics.jsonl, summary.json and last.ckpt."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import IO, Any

from geartrain.checkpoint import LAST, checkpoint_state, save
from geartrain.errors import UsageError
from geartrain.hookspecs import hookimpl
from geartrain.plan import Plan
from geartrain.run import Run
from geartrain.whole_files import remove_abandoned


class RunFolder:
    """Writes what a run decided, logged and ended with. Rank 0 writes.

    Args:
        path: the folder; made where it is not there.
        first: whether this is rank 0, which must find no other run there, unless it goes on with it; the others find the one
            that it began.

    Raises:
        UsageError: it is a file; or, by ``check_plan``, holds another run already.
    """

    def __init__(self, path: Path, first: bool = True) -> None:
        if path.exists() and not path.is_dir():
            raise UsageError(f"output={str(path)!r} is not a folder.")
        self.path, self._looks = path, first
        self._metrics: IO[str] | None = None
        self._started = 0.0
        self._last: dict[str, float] = {}

    @hookimpl
    def check_plan(self, plan: Plan) -> None:
        # Only what this object finds at first: a later run of its goes on in the folder that the first one began.
        if self._looks and not plan.resumes and (self.path / "plan.json").exists():
            raise UsageError(
                f"output={str(self.path)!r} holds a run already, and nothing is overwritten. Fix: another folder, or remove this one; "
                "or go on with that run: fit(..., ckpt_path='last'), on the command line --resume"
            )
        self._looks = False

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        self._started = time.monotonic()
        if run.world.rank == 0:
            self.path.mkdir(parents=True, exist_ok=True)
            _write_json(self.path / "plan.json", run.plan.as_dict())
            self._metrics = (self.path / "metrics.jsonl").open("a", encoding="utf-8")

    @hookimpl
    def log_metrics(self, run: Run, metrics: Mapping[str, float], step: int) -> None:
        if self._metrics is not None:
            line = {"step": step, "epoch": run.epoch, "stage": run.stage, **_writable(metrics)}
            self._metrics.write(json.dumps(line, allow_nan=False) + "\n")
            self._metrics.flush()

    @hookimpl
    def on_run_end(self, run: Run) -> None:
        self._close(run, {"status": "done"})

    @hookimpl
    def on_exception(self, run: Run, error: BaseException) -> None:
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        self._close(run, {"status": status, "error": f"{type(error).__name__}: {error}"})

    def _close(self, run: Run, outcome: dict[str, Any]) -> None:
        if self._metrics is None:
            return
        self._metrics.close()
        self._metrics = None
        self._last |= run.metrics
        seconds = round(time.monotonic() - self._started, 3)
        summary = {
            **outcome,
            "command": run.command,
            "seconds": seconds,
            "steps": run.step,
            "epochs": run.epoch,
            "metrics": _writable(self._last),
        }
        _write_json(self.path / "summary.json", summary)


class LastCheckpoint:
    """Writes the run folder's last.ckpt after each epoch. Every rank's business.

    A part of its own, registered last: it saves after all that others do at the end of an epoch, so that their state in it is of then.
    """

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        if run.output is not None and run.world.rank == 0:
            remove_abandoned(run.output, ".ckpt")

    @hookimpl(wrapper=True)
    def on_epoch_end(self, run: Run) -> Generator[None, Any, Any]:
        results = yield
        if run.output is not None:
            save(run, checkpoint_state(run, run.epoch + 1), run.output / LAST)
        return results


def _writable(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """JSON has no NaN and no infinity: they are written as strings, ``"nan"`` and ``"inf"``."""
    return {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}


def _write_json(path: Path, facts: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
