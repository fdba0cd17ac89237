"""``model_checkpoint``: keep the best checkpoints by a metric."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from geartrain import Plan, Run, TrainingError, UsageError, hookimpl
from geartrain.plugin_api import remove_abandoned, user_path, warn
from geartrain_callbacks import exception_checkpoint
from geartrain_callbacks.best_files import BestFiles, Decision
from geartrain_callbacks.callback import PluginCallback
from geartrain_callbacks.checkpoint_names import SUFFIX, check_pattern, fields, fill, free
from geartrain_callbacks.checkpoint_options import check_options
from geartrain_callbacks.durations import Duration, seconds
from geartrain_callbacks.fresh_start import FreshStart
from geartrain_callbacks.monitoring import check_mode, is_better, looks_after_epochs, not_logged
from geartrain_callbacks.own_files import best_of, delete, is_own, link, written_after
from geartrain_callbacks.stopping import say

_FIX = "Fix: log it with self.log, or monitor another"


class ModelCheckpoint(BestFiles, FreshStart, PluginCallback):
    """Keep the best checkpoints by a metric. Options are named as in PyTorch Lightning.

    Rank 0 decides which files to save and to delete, by its own value of the metric, and the other
    ranks do the same. So all ranks name the same best file, even if the metric is logged without
    ``sync_dist``. A file is deleted only after its replacement is completely on disk. A file of
    another run is never overwritten: the new file gets ``-v1`` etc. Of equal scores the older file
    is better; NaN is never among the best. A ``fit`` that does not resume starts from scratch, and
    leaves the files of earlier ones alone.

    A file's score belongs to its weights. If the metric was not logged in the epoch (or the step
    of ``every_n_train_steps``) of a check, the check is repeated after the next validation and at
    the end of the epoch, until the current weights have a value.

    It deletes only files that it wrote in its own folder. A ``fit`` that resumes from a checkpoint
    in this folder or in the run's folder continues with the files that the checkpoint lists and
    that still exist. The file that it resumed from stays; with ``ckpt_path="auto"`` until the
    ``fit`` is done. A ``fit`` that resumes from a checkpoint elsewhere starts from scratch here and
    leaves the files there alone.

    Args:
        monitor: the metric's name; ``None``: the newest checkpoint replaces the one before;
            ``"step"`` or ``"epoch"`` with ``mode="max"`` keeps the newest ``save_top_k``.
        mode: ``"min"`` if smaller is better, ``"max"`` if larger is better.
        save_top_k: how many of the best to keep; -1 keeps all, 0 none. Without ``monitor``: -1, 0
            or 1.
        save_last: also save ``last.ckpt`` at each check; ``"link"``: as a link to the file of the
            same check, if that is kept and complete.
        dirpath: the folder; default ``checkpoints`` in the run's folder.
        filename: a pattern with ``epoch``, ``step`` and metrics in braces, such as
            ``"{epoch:02d}-{val_loss:.2f}"``; default ``"{epoch}-{step}"``.
        auto_insert_metric_name: put ``NAME=`` before each of them.
        every_n_epochs: check only every n-th epoch; default: every epoch.
        every_n_train_steps: check every n optimizer steps instead.
        save_on_train_epoch_end: check after each epoch; ``False``: after each validation. Default:
            after each epoch if validation is off or runs at each epoch's end; otherwise after each
            validation.
        verbose: print a line for each file.
        save_weights_only: leave out what only resuming a ``fit`` needs.
        save_on_exception: if an error or Ctrl-C ends the training, also save ``exception.ckpt``,
            with rank 0's state.
        train_time_interval: check after this time instead, at the end of a step; with several
            ranks at a flush, by rank 0's clock: ``"DD:HH:MM:SS"``, seconds or a ``timedelta``.

    Raises:
        UsageError: options contradict each other; neither ``dirpath`` nor a folder for the run
            exists; or checks are due after validation, and the run has none.
        TrainingError: ``monitor`` or a metric of ``filename`` was not logged.
    """

    #: A checkpoint holds rank 0's state.
    same_on_all_ranks = True

    def __init__(
        self,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_top_k: int = 1,
        save_last: bool | Literal["link"] = False,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        auto_insert_metric_name: bool = True,
        every_n_epochs: int | None = None,
        every_n_train_steps: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        verbose: bool = False,
        save_weights_only: bool = False,
        save_on_exception: bool = False,
        train_time_interval: Duration | None = None,
    ) -> None:
        check_mode("model_checkpoint", mode, monitor)
        check_options(
            monitor=monitor,
            save_top_k=save_top_k,
            save_last=save_last,
            save_on_exception=save_on_exception,
            by_epochs={
                "every_n_epochs": every_n_epochs,
                "save_on_train_epoch_end": save_on_train_epoch_end,
            },
            by_steps={
                "every_n_train_steps": every_n_train_steps,
                "train_time_interval": train_time_interval,
            },
        )
        self.monitor, self.save_last = monitor, save_last
        self.save_weights_only, self.save_on_exception = save_weights_only, save_on_exception
        self.dirpath = (
            None
            if dirpath is None
            else user_path(dirpath, "geartrain-callbacks[model_checkpoint]: dirpath")
        )
        super().__init__(mode, save_top_k, self.dirpath)
        self.filename = check_pattern("{epoch}-{step}" if filename is None else filename)
        if save_last and self.filename == "last":
            raise UsageError(
                "model_checkpoint: filename='last' is the file of save_last. Fix: use another name"
            )
        self.auto_insert_metric_name, self.verbose = auto_insert_metric_name, verbose
        self._epochs = every_n_epochs or 1
        self._steps = every_n_train_steps
        self._seconds: float | None = None
        if train_time_interval is not None:
            self._seconds = seconds("model_checkpoint: train_time_interval", train_time_interval)
        #: ``time.monotonic()`` of the last check by time, or when the run began.
        self._checked_at = 0.0
        self._asked_when = save_on_train_epoch_end
        self._on = self._at_epoch_end = self._looked = self._warned_of_nan = False
        self._validated = self._expected = self._warned = False
        #: True if the last check found no value for the current weights.
        self._retries = False
        #: True if an error ended this object's last fit, and it saved a checkpoint.
        self._has_raised = False
        #: Files that are not complete yet: ``async_checkpoint`` writes them.
        self._unwritten: set[str] = set()

    def __repr__(self) -> str:
        return (
            f"ModelCheckpoint(monitor={self.monitor!r}, mode={self.mode!r}, "
            f"filename={self.filename!r})"
        )

    @hookimpl
    def find_checkpoint(self, which: str, output: Path | None) -> list[Path]:
        if which == "best" and self._best:
            return [Path(self.best_model_path)]
        folder = self.dirpath
        if folder is None and output is not None:
            folder = output / "checkpoints"
        if (
            folder is None
            or output is None
            or not folder.resolve().is_relative_to(output.resolve())
        ):
            folder = None  # files of another process elsewhere may belong to another run
        if which == "best":  # of an earlier process
            best = ""
            if folder is not None and output is not None:
                best = best_of(folder, output / "last.ckpt", self.monitor)
            return [folder / best] if folder is not None and best else []
        if which == "any":
            return [] if folder is None else sorted(folder.rglob("*.ckpt"))
        if self.save_weights_only and output is not None:
            return []  # a fit resumes from the last.ckpt of its folder
        found = [Path(self.last_model_path)] if self._last else []
        if self.save_last and folder is not None and not found:
            found = list(filter(_is_last, sorted(folder.glob("last*.ckpt"))))
        place = self._where if self._has_raised else folder
        if self.save_on_exception and place is not None:
            found.append(place / exception_checkpoint.NAME)
        return found

    # --- when to check ---------------------------------------------------------------------------

    @hookimpl
    def check_plan(self, plan: Plan) -> None:
        folder = self._folder(plan)
        if folder is None and not plan.options.fast_dev_run:
            raise UsageError(
                "geartrain-callbacks[model_checkpoint] has no place to write. "
                "Fix: --model_checkpoint.dirpath DIR, or a folder for the run (--output DIR)"
            )
        if folder is not None and folder.exists() and not folder.is_dir():
            raise UsageError(
                f"geartrain-callbacks[model_checkpoint]: {str(folder)!r} is not a folder. "
                "Fix: use another dirpath"
            )
        self._planned = folder

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        self._on = run.command == "fit" and not run.plan.options.fast_dev_run
        self._validated = self._expected = self._warned = False
        if self._on:
            self._retries = self._retries and run.loop.resumed is not None
            self._open_folder(run)
        self._looked = run.loop.resumed is not None and bool(self._best or self._last)
        self._has_raised, self._checked_at = False, time.monotonic()
        self._unwritten.clear()
        if self._on and self._by_epochs:
            self._at_epoch_end = looks_after_epochs(
                run, self._asked_when, "model_checkpoint", "save_on_train_epoch_end"
            )

    # Wrappers, so that the check comes last: after plugins that fail the run, that replace the
    # weights for validation, or whose state belongs in the checkpoint.

    @hookimpl(wrapper=True)
    def on_step_end(self, run: Run) -> Generator[None, Any, Any]:
        results = yield
        if self._on and not self._by_epochs and self._step_is_due(run):
            self._check(run, run.epoch)
        return results

    @hookimpl(wrapper=True, specname="on_validation_end")
    def _on_validation_end(self, run: Run) -> Generator[None, Any, Any]:
        results = yield
        if self._on and run.stage == "validate":
            self._validated = True
            due = self._by_epochs and not self._at_epoch_end and self._is_due(run)
            self._expected |= due
            if due or (self._retries and not self._at_epoch_end):
                self._check(run, run.epoch, due)
        return results

    @hookimpl(wrapper=True)
    def on_epoch_end(self, run: Run) -> Generator[None, Any, Any]:
        results = yield
        if self._on:
            self._expected |= self._validated or not run.stages["validate"].loaders
            due = self._by_epochs and self._at_epoch_end and self._is_due(run)
            if due or self._retries:
                self._check(run, run.epoch + 1, due)
        return results

    @hookimpl
    def on_run_end(self, run: Run) -> None:
        if self._on:
            self._source = ""
            self._unwritten.clear()
            self._delete_old(run)
        if self._on and not self._looked and run.world.rank == 0:
            when = f"every_n_epochs={self._epochs}"
            if self._seconds is not None:
                when = f"train_time_interval={self._seconds:g} s"
            elif self._steps is not None:
                when = f"every_n_train_steps={self._steps}"
            warn(
                f"geartrain-callbacks[model_checkpoint] saved nothing: {when}, "
                f"and the run had {run.epoch} epochs and {run.step} steps"
            )

    @hookimpl(wrapper=True, specname="on_exception")
    def _save_on_exception(self, run: Run, error: BaseException) -> Generator[None, Any, Any]:
        try:
            return (yield)
        finally:  # after plugins that put the trained weights back
            if self._on and self.save_on_exception and self._where is not None:
                path = self._where / exception_checkpoint.NAME
                saved = exception_checkpoint.save(run, path, error, self.save_weights_only)
                self._has_raised = saved

    @property
    def _by_epochs(self) -> bool:
        return self._steps is None and self._seconds is None

    def _step_is_due(self, run: Run) -> bool:
        if self._steps is not None:
            return run.step % self._steps == 0
        if run.world.size > 1 and run.step % run.plan.options.log_every_n_steps:
            return False
        assert self._seconds is not None
        due = time.monotonic() - self._checked_at >= self._seconds
        if run.world.size > 1:  # each rank has its own clock
            due = run.hooks.broadcast(run=run, obj=due, src=0)
        if due:
            self._checked_at = time.monotonic()
        return due

    @hookimpl
    def on_checkpoint_saved(self, run: Run, path: Path) -> None:
        self._unwritten = {name for name in self._unwritten if Path(self._path(name)) != path}
        self._delete_old(run)

    def _open_folder(self, run: Run) -> None:
        """Set the files with which this fit continues, on every rank to those rank 0 finds."""
        folder = self._folder(run.plan)
        assert folder is not None  # otherwise check_plan has raised
        if run.world.rank == 0:
            remove_abandoned(folder, SUFFIX, below="/" in self.filename)
            if self._continues(run, folder):
                if run.loop.memory_checkpoint is None:
                    self._drop_lost(folder)  # otherwise a check that is repeated replaced them
                self._delete_leftovers(run, folder)
            else:
                self._start_from_scratch(run, folder)
            self._identity = self._identity or uuid4().hex
        self._planned = self._where = folder
        source = None if run.loop.resumed is None else run.loop.resumed.path
        name = "" if source is None else os.path.relpath(source.resolve(), folder.resolve())
        self._source = self._chosen = Path(name).as_posix()
        if source is None or source.is_symlink() or getattr(run.loop.start, "may_be_done", False):
            self._chosen = ""  # the user has chosen no file, or a link to another
        self._output = "" if run.output is None else str(run.output.resolve())
        if run.world.size > 1 and run.loop.memory_checkpoint is None:  # which all ranks have
            self.load_state_dict(run.hooks.broadcast(run=run, obj=self.state_dict(), src=0))

    def _continues(self, run: Run, folder: Path) -> bool:
        """True if the named files belong to this run, not to a run in another folder."""
        if run.loop.resumed is None:
            return False
        if run.loop.resumed.path is None:  # a checkpoint in memory
            return self._where in (None, folder)
        source, mine = run.loop.resumed.path.resolve(), folder.resolve()
        if source.is_relative_to(mine) or mine.is_relative_to(source.parent):
            return True
        if run.output is None or not source.is_relative_to(home := run.output.resolve()):
            return False
        # A dirpath elsewhere belongs to the original run, not to a copy of its folder.
        return mine.is_relative_to(home) or self._output == str(home)

    def _start_from_scratch(self, run: Run, folder: Path) -> None:
        if self._scores:  # otherwise no file was the best by a metric
            source = self._where if run.loop.resumed is None else run.loop.resumed.path
            warn(
                f"geartrain-callbacks[model_checkpoint]: {source} belongs to another folder than "
                f"{folder}. The checkpoints there stay "
                "as they are, and this run starts its list of the best from scratch"
            )
        self._identity = self._best = self._last = ""
        self.best_model_score, self._scores, self._old = None, {}, []

    def _delete_leftovers(self, run: Run, folder: Path) -> None:
        """Delete files left by a kill: replaced files, and files newer than the checkpoint.

        If the user resumes from an older checkpoint than the last, newer files stay.
        """
        if run.loop.resumed is None:
            return
        kept = {self._best, self._last, *self._scores}
        remaining = [
            name for name in self._old if name not in kept and is_own(folder, name, self._identity)
        ]
        path, batches = run.loop.resumed.path, run.loop.resumed.batch_idx
        if path is None or _is_last(path):
            # A checkpoint in memory knows no file that was saved in the same place after it.
            done = (run.epoch, run.step, batches - (path is None))
            remaining += written_after(folder, self._identity, done, kept)
        for name in remaining:
            delete(folder, name)
        self._old = []

    def _is_due(self, run: Run) -> bool:
        return (run.epoch + 1) % self._epochs == 0

    # --- decisions -------------------------------------------------------------------------------

    def _check(self, run: Run, epochs: int, due: bool = True) -> None:
        """Check, and save the files that are due.

        Args:
            epochs: epochs done.
            due: ``False`` to repeat a check that found no value.
        """
        self._looked = True
        names = [*([] if self.monitor is None else [self.monitor]), *fields(self.filename)]
        if names:
            run.logs.refresh(*names)
        turn = self._decide(run, epochs, due) if run.world.rank == 0 else None
        if run.world.size > 1:
            turn = run.hooks.broadcast(run=run, obj=turn, src=0)
        assert turn is not None
        if turn.error:
            raise TrainingError(turn.error)
        if turn.missing and not self._warned:
            warn(f"{turn.missing} Until it is, nothing is kept as the best")
            self._warned = True
        names = [name for name in (turn.name, turn.last) if name]
        before, self._retries = self.state_dict(), turn.retries
        self._remember(turn)  # before saving: the file's state must list the file itself
        try:
            if turn.last and run.world.rank == 0 and Path(self.last_model_path).is_symlink():
                Path(self.last_model_path).unlink()  # a writer may write through the link
            state = run.checkpoint(epochs, self.save_weights_only) if names else {}
            for name in names:
                links = self.save_last == "link" and name == turn.last and turn.name != ""
                links = links and turn.name not in self._unwritten  # no link to a missing file
                self._unwritten.add(name)
                if not links or not self._link(run, name, turn.name):
                    run.save_checkpoint(state, Path(self._path(name)))
        except BaseException:
            self.load_state_dict(before)
            self._unwritten.clear()
            raise
        self._report_and_delete(run, turn)

    def _decide(self, run: Run, epochs: int, due: bool) -> Decision:
        folder = self._folder(run.plan)
        assert folder is not None  # otherwise check_plan has raised
        last = free(folder, "last", self._last) if self.save_last else ""
        score = None
        if self.monitor is not None:
            score, when = (
                run.loop.reported.get(self.monitor),
                run.logs.when.get(self.monitor, (-1, -1)),
            )
            if self.monitor in ("epoch", "step"):  # self.log refuses these names
                score, when = getattr(run, self.monitor), (run.epoch, run.step)
            missing, every = "", f"every {self._steps} steps" if self._steps else "by time"
            if score is None:
                missing = not_logged("model_checkpoint", self.monitor, sorted(run.metrics))
                if self._expected:
                    return Decision(error=f"{missing} {_FIX}")
            elif (
                when[0] == run.epoch
                and not self._by_epochs
                and when[1] != run.step
                and epochs > run.epoch
            ):
                missing = (
                    f"geartrain-callbacks[model_checkpoint] monitors {self.monitor!r}, "
                    f"which was logged after step {when[1]}, "
                    f"and it checks {every}. Fix: log it in each step."
                )
            if missing or when[0] != run.epoch or (not self._by_epochs and when[1] != run.step):
                return Decision(last=last if due else "", missing=missing, retries=True)
        if not self._is_among_the_best(score):
            return Decision(last=last)
        if self.monitor is not None:
            drop = self._kth_best()
        else:
            drop = self._best if self.save_top_k == 1 else ""
        try:
            name = fill(
                self.filename,
                {**run.loop.reported, "epoch": run.epoch, "step": run.step},
                self.auto_insert_metric_name,
            )
            return Decision(free(folder, name, drop, self._scores), score, drop, last)
        except TrainingError as error:  # raised on all ranks by the caller
            return Decision(error=str(error))

    def _is_among_the_best(self, score: float | None) -> bool:
        if self.save_top_k <= 0 or score is None:
            return self.save_top_k != 0
        worst = self._kth_best()
        if math.isnan(score) and not self._warned_of_nan:
            self._warned_of_nan = True
            warn(f"geartrain-callbacks[model_checkpoint] saves nothing while {self.monitor} is NaN")
        return not math.isnan(score) and (
            not worst or is_better(self.mode, score, self._scores[worst])
        )

    def _report_and_delete(self, run: Run, turn: Decision) -> None:
        if turn.name and self.verbose:
            reason = "" if turn.score is None else f": {self.monitor} = {turn.score:.6g}"
            say(run, f"model_checkpoint: saved {self._path(turn.name)}{reason}.")
        self._delete_old(run)

    def _delete_old(self, run: Run) -> None:
        if self._unwritten:
            return  # a file is deleted only after its replacement is complete
        if run.world.rank == 0 and self._where is not None:
            for name in self._old:
                if name != self._source:
                    delete(self._where, name)
        self._old = [name for name in self._old if name == self._source]

    def _link(self, run: Run, name: str, target: str) -> bool:
        """Make a file of the folder a relative link to another; ``False`` if links are refused."""
        done = run.world.rank == 0 and link(Path(self._path(name)), Path(self._path(target)))
        if run.world.size > 1:
            done = run.hooks.broadcast(run=run, obj=done, src=0)
        if done:
            run.hooks.on_checkpoint_saved(run=run, path=Path(self._path(name)))
        return done

    def _folder(self, plan: Plan) -> Path | None:
        if self.dirpath is not None:
            return Path(self.dirpath)
        return None if plan.output is None else plan.output / "checkpoints"

    # --- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "owed": self._retries, "monitor": self.monitor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with these files.

        Raises:
            ValueError: a name leads out of the folder.
        """
        super().load_state_dict(state)
        self._retries = bool(state.get("owed"))


def _is_last(path: Path) -> bool:
    """True if a file has the name of a last checkpoint."""
    return re.fullmatch(r"last(-v\d+)?\.ckpt", path.name) is not None
