"""The run's folder, ``output=DIR``: plan.json, metrics.jsonl, summary.json and last.ckpt."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, Timeout

from geartrain.checkpoint.checkpoints import LAST
from geartrain.errors import TrainingError, UsageError
from geartrain.files.atomic import AppendedFile, make_folder, remove_abandoned, replacing
from geartrain.hookspecs import hookimpl
from geartrain.loop.run import Run
from geartrain.plan import Plan


class RunFolder:
    """Writes the plan, the metrics and the end of a run. Rank 0 writes.

    Args:
        path: the folder; created if it does not exist.
        first: True in the process that starts the run as rank 0. It refuses a folder with another
            run, unless it resumes that run.

    Raises:
        UsageError: it is a file; or, in ``check_plan`` and ``reserved``, another run uses it or has
            left its files.
    """

    def __init__(self, path: Path, first: bool = True) -> None:
        if path.exists() and not path.is_dir():
            raise UsageError(f"output={str(path)!r} is a file. Fix: name a folder")
        self.path, self._starts_run = path, first
        #: True after the first run of this object: later ones continue in its folder.
        self._owns_folder = False
        self._metrics: AppendedFile | None = None
        self._started = 0.0
        self._last: dict[str, float] = {}

    @hookimpl
    def find_checkpoint(self, which: str) -> list[Path]:
        if which == "any":
            return sorted((self.path / "checkpoints").rglob("*.ckpt"))
        return [self.path / LAST] if which == "last" else []

    @contextmanager
    def reserved(self, resumes: bool = False) -> Iterator[None]:
        """Keep other runs out of the folder during a run: until the block ends.

        Raises:
            UsageError: another run uses it, or has left its files and is not resumed.
        """
        if not self._starts_run:
            yield
            return
        with _locked(self.path):
            self._refuse_other_run(resumes)  # under the lock, so that only one of two runs passes
            began, before = self._owns_folder, _changed(self.path / "plan.json")
            if before and not began and not resumes:  # of a run that failed early
                (self.path / "metrics.jsonl").unlink(missing_ok=True)
            self._owns_folder = True
            try:
                yield
            except BaseException as error:
                if _changed(self.path / "plan.json") != before:
                    self._correct_summary(error)
                else:  # nothing started: the folder still belongs to the earlier run
                    self._owns_folder = began
                raise

    @hookimpl
    def check_plan(self, plan: Plan) -> None:
        if self._starts_run:
            self._refuse_other_run(plan.resumes)

    def _refuse_other_run(self, resumes: bool) -> None:
        begins = not (self._owns_folder or resumes)
        if begins and (self.path / "plan.json").exists() and not self._has_failed_early():
            raise UsageError(
                f"output={str(self.path)!r} already contains a run, which geartrain does not "
                "overwrite. Fix: use another folder; or remove this one; or resume its run with "
                "fit(..., ckpt_path='last'), on the command line with --resume"
            )

    def _has_failed_early(self) -> bool:
        """True if the run in the folder failed before its first checkpoint: none can resume it."""
        with suppress(OSError, ValueError):
            summary = json.loads((self.path / "summary.json").read_text(encoding="utf-8"))
            return summary["status"] != "done" and not any(self.path.rglob("*.ckpt"))
        return False

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        self._started = time.monotonic()
        if run.world.rank == 0:
            for kind in (".ckpt", ".csv", ".json", ".pt"):
                remove_abandoned(self.path, kind)
            # An earlier run's: this run may be killed before it writes its own. After an OSError
            # plan.json cannot be written either, with a better error.
            with suppress(OSError):
                (self.path / "summary.json").unlink(missing_ok=True)
            _write_json(self.path / "plan.json", run.plan.as_dict())
            self._metrics = AppendedFile(self.path / "metrics.jsonl")

    @hookimpl
    def log_metrics(self, run: Run, metrics: Mapping[str, float], step: int) -> None:
        if self._metrics is not None:
            line = {"step": step, "epoch": run.epoch, "stage": run.stage, **_writable(metrics)}
            self._metrics.append(f"{json.dumps(line, allow_nan=False)}\n".encode())

    @hookimpl
    def on_run_end(self, run: Run) -> None:
        resumed = run.loop.resumed if self._metrics is not None else None
        source = resumed.path if resumed else None
        if source is not None and source != self.path / LAST and source.is_file():
            # Nothing was trained: a kill came between a plugin's last checkpoint and this one.
            with replacing(self.path / LAST) as file:
                file.write(source.read_bytes())
        self._close(run, {"status": "done"})

    @hookimpl(wrapper=True)
    def on_exception(self, run: Run, error: BaseException) -> Generator[None, Any, Any]:
        try:
            return (yield)
        finally:  # also if another plugin raises
            self._close(run, _failure(error))

    def _correct_summary(self, error: BaseException) -> None:
        """Write the error that the caller gets to summary.json.

        Rank 0 may have written only the error of a connection that a failed rank closed, or nothing
        if it was killed.
        """
        path = self.path / "summary.json"
        try:
            written = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            _write_json(path, {**written, **_failure(error)})
        except (OSError, ValueError, TrainingError) as second:
            error.add_note(f"and then: summary.json could not be written: {second}")

    def _close(self, run: Run, outcome: dict[str, Any]) -> None:
        if self._metrics is None:
            return
        self._metrics.append(b"")  # warns if the user has removed the folder
        self._metrics.close()
        if not (self.path / "plan.json").exists():
            _write_json(self.path / "plan.json", run.plan.as_dict())
        self._metrics = None
        self._last |= run.loop.reported
        seconds = round(time.monotonic() - self._started, 3)
        done = {"seconds": seconds, "steps": run.step, "epochs": run.epoch}
        summary = {**outcome, "command": run.command, **done, "metrics": _writable(self._last)}
        _write_json(self.path / "summary.json", summary)


class LastCheckpoint:
    """Writes the run folder's last.ckpt after each epoch, in every rank.

    It is registered last, so that it saves the state of all other parts after the epoch.
    """

    @hookimpl(wrapper=True)
    def on_epoch_end(self, run: Run) -> Generator[None, Any, Any]:
        results = yield
        if run.output is not None:
            run.save_checkpoint(run.checkpoint(run.epoch + 1), run.output / LAST)
        return results


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other runs of this and other processes out of a folder until the block ends.

    Creates the folder if it does not exist; then removes it at the end if it is empty. The end of
    the process releases the lock too. A file system that has no locks is used without one.

    Raises:
        UsageError: another run uses the folder, or the folder cannot be created.
    """
    name, existed, path = f"output={str(folder)!r}", folder.exists(), folder / "run.lock"
    try:
        make_folder(folder)
    except OSError as error:
        message = f"{name} cannot be created: {error.strerror}"
        raise UsageError(f"{message}. Fix: use another folder") from error
    lock = FileLock(path, blocking=False, thread_local=False, fallback_to_soft=False)
    with ExitStack() as stack:
        if not existed:
            stack.callback(_remove, folder.rmdir)  # if it is empty
        try:
            lock.acquire()
        except Timeout:
            hint = "use another folder, or wait until that run has ended"
            message = f"another run uses {name}: {path.read_text(encoding='utf-8')}. Fix: {hint}"
            raise UsageError(message) from None
        except OSError:
            pass
        else:
            stack.callback(_unlock, lock)
            with suppress(OSError):
                holder = f"process {os.getpid()} on {socket.gethostname()}"
                path.write_text(holder, encoding="utf-8")
        yield


def _unlock(lock: BaseFileLock) -> None:
    if lock.is_locked:  # False in a forked child
        _remove(Path(lock.lock_file).unlink)  # first, while no other run can lock it
        lock.release()


def _remove(action: Callable[[], None]) -> None:
    with suppress(OSError):
        action()


def _failure(error: BaseException) -> dict[str, Any]:
    status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    return {"status": status, "error": f"{type(error).__name__}: {error}"}


def _changed(path: Path) -> int | None:
    """Return when a file was written, in nanoseconds; ``None`` if it does not exist."""
    return path.stat().st_mtime_ns if path.exists() else None


def _writable(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """Return metrics as JSON can hold them: NaN and infinity as ``"nan"`` and ``"inf"``."""
    return {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}


def _write_json(path: Path, facts: Mapping[str, Any]) -> None:
    with replacing(path) as file:
        file.write(f"{json.dumps(facts, indent=2)}\n".encode())
