"""``model_checkpoint``: keep the best checkpoints by a metric."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from geartrain import Plan, Run, TrainingError, UsageError, hookimpl
from geartrain.plugin_api import remove_abandoned, user_path, warn
from geartrain_callbacks.callback import PluginCallback
from geartrain_callbacks.checkpoint_names import SUFFIX, check_pattern, fields, fill, free
from geartrain_callbacks.monitoring import check_mode, is_better, looks_after_epochs, not_logged
from geartrain_callbacks.own_files import check_name, delete, is_own, link, written_after
from geartrain_callbacks.stopping import say

_FIX = "Fix: log it with self.log, or monitor another"


@dataclass(frozen=True, slots=True)
class _Decision:
    """A decision of rank 0; every rank carries it out. File names are relative to the folder."""

    #: The file of the newest checkpoint; empty if it is not among the best.
    name: str = ""
    score: float | None = None
    #: The file that the new one replaces.
    drop: str = ""
    last: str = ""
    #: The warning if the metric is missing but may still be logged.
    missing: str = ""
    #: The error if the metric is missing and should have been logged.
    error: str = ""
    #: True if the metric has no value for these weights yet. The next validation or end of an
    #: epoch that logs one is used instead.
    retries: bool = False


class ModelCheckpoint(PluginCallback):
    """Keep the best checkpoints by a metric. Options are named as in PyTorch Lightning.

    Rank 0 decides which files to save and to delete, by its own value of the metric, and the other
    ranks do the same. So all ranks name the same best file, even if the metric is logged without
    ``sync_dist``. A file is deleted only after its replacement is completely on disk. A file of
    another run is never overwritten: the new file gets ``-v1`` etc. Of equal scores the older file
    is better; NaN is never among the best. A second ``fit`` with the same object continues.

    A file's score belongs to its weights. If the metric was not logged in the epoch (or the step
    of ``every_n_train_steps``) of a check, the check is repeated after the next validation and at
    the end of the epoch, until the current weights have a value.

    It deletes only files that it wrote in its own folder. A ``fit`` that resumes from a checkpoint
    in this folder or in the run's folder continues with the files that the checkpoint lists and
    that still exist. If the file that it resumed from is replaced, it is deleted when the ``fit``
    is done, so that the same command can resume again. A ``fit`` that resumes from a checkpoint
    elsewhere starts from scratch here and leaves the files there alone.

    Args:
        monitor: the metric's name; ``None``: the newest checkpoint replaces the one before;
            ``"step"`` or ``"epoch"`` with ``mode="max"`` keeps the newest ``save_top_k``.
        mode: ``"min"`` if smaller is better, ``"max"`` if larger is better.
        save_top_k: how many of the best to keep; -1 keeps all, 0 none. Without ``monitor``: -1, 0
            or 1.
        save_last: also save ``last.ckpt`` at each check; ``"link"``: as a link to the file of the
            same check, if that is kept.
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
    ) -> None:
        check_mode("model_checkpoint", mode, monitor)
        if isinstance(save_top_k, bool) or not isinstance(save_top_k, int) or save_top_k < -1:
            raise UsageError(
                f"model_checkpoint: save_top_k={save_top_k!r} must be a whole number, at least -1."
            )
        if monitor is None and save_top_k > 1:
            raise UsageError(
                f"model_checkpoint: save_top_k={save_top_k} needs a metric. "
                "Fix: monitor='val_loss', or monitor='step' and mode='max' to keep the newest"
            )
        if save_last not in (True, False, "link"):
            raise UsageError(f"model_checkpoint: save_last={save_last!r}. Fix: True or 'link'")
        if save_top_k == 0 and not save_last:
            raise UsageError(
                "model_checkpoint: save_top_k=0 without save_last saves nothing. "
                "Fix: leave the plugin out, or save_last=True"
            )
        for name, value in (
            ("every_n_epochs", every_n_epochs),
            ("every_n_train_steps", every_n_train_steps),
        ):
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or value < 1
            ):
                raise UsageError(
                    f"model_checkpoint: {name}={value!r} must be a whole number, at least 1."
                )
        if every_n_train_steps is not None and (
            every_n_epochs is not None or save_on_train_epoch_end is not None
        ):
            raise UsageError(
                "model_checkpoint: every_n_train_steps checks by steps, every_n_epochs and "
                "save_on_train_epoch_end by epochs. "
                "Fix: leave one out, or two of them with a filename each"
            )
        self.monitor = monitor
        self.mode = mode
        self.save_top_k = save_top_k
        self.save_last = save_last
        self.dirpath = (
            None
            if dirpath is None
            else user_path(dirpath, "geartrain-callbacks[model_checkpoint]: dirpath")
        )
        self.filename = check_pattern("{epoch}-{step}" if filename is None else filename)
        if save_last and self.filename == "last":
            raise UsageError(
                "model_checkpoint: filename='last' is the file of save_last. Fix: use another name"
            )
        self.auto_insert_metric_name, self.verbose = auto_insert_metric_name, verbose
        self._epochs = every_n_epochs or 1
        self._steps = every_n_train_steps
        self._asked_when = save_on_train_epoch_end
        self._on = self._at_epoch_end = self._looked = self._warned_of_nan = False
        self._validated = self._expected = self._warned = False
        #: True if the last check found no value for the current weights.
        self._retries = False
        #: The score of the best file.
        self.best_model_score: float | None = None
        #: A random id, drawn at a start from scratch. It marks the files that this object wrote.
        self._identity = ""
        #: The run's folder when the state was saved; only compared, never opened.
        self._output = ""
        # Names are relative to the folder, so that a copy of the folder is complete.
        self._best = self._last = ""
        self._scores: dict[str, float] = {}
        #: Files that the file being saved replaces, and the source if it was replaced.
        self._old: list[str] = []
        #: The file that this fit resumed from, if it is in the folder.
        self._source = ""
        #: The folder that the next fit writes to, and the folder of the named files.
        self._planned = self._where = self.dirpath

    def __repr__(self) -> str:
        return (
            f"ModelCheckpoint(monitor={self.monitor!r}, mode={self.mode!r}, "
            f"filename={self.filename!r})"
        )

    @property
    def best_model_path(self) -> str:
        """The best file so far; without ``monitor`` the newest; empty if none exists."""
        return self._path(self._best)

    @property
    def last_model_path(self) -> str:
        """The newest ``last.ckpt``; empty without ``save_last``."""
        return self._path(self._last)

    @property
    def best_k_models(self) -> dict[str, float]:
        """The scores of the best files, oldest file first."""
        return {self._path(name): score for name, score in self._scores.items()}

    @property
    def kth_best_model_path(self) -> str:
        """The file that the next better one replaces; empty if fewer than ``save_top_k`` exist."""
        return self._path(self._kth_best())

    @hookimpl
    def find_checkpoint(self, which: str, output: Path | None) -> list[Path]:
        if which == "best":
            return [Path(self.best_model_path)] if self._best else []
        folder = self.dirpath
        if folder is None and output is not None:
            folder = output / "checkpoints"
        if (
            folder is None
            or output is None
            or not folder.resolve().is_relative_to(output.resolve())
        ):
            folder = None  # files of another process elsewhere may belong to another run
        if which == "any":
            return [] if folder is None else sorted(folder.rglob("*.ckpt"))
        if self._last:
            return [Path(self.last_model_path)]
        if not self.save_last or folder is None:
            return []
        return list(filter(_is_last, sorted(folder.glob("last*.ckpt"))))

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
        if self._on and self._steps is None:
            self._at_epoch_end = looks_after_epochs(
                run, self._asked_when, "model_checkpoint", "save_on_train_epoch_end"
            )

    # Wrappers, so that the check comes last: after plugins that fail the run, that replace the
    # weights for validation, or whose state belongs in the checkpoint.

    @hookimpl(wrapper=True)
    def on_step_end(self, run: Run) -> Generator[None, Any, Any]:
        results = yield
        if self._on and self._steps is not None and run.step % self._steps == 0:
            self._check(run, run.epoch)
        return results

    @hookimpl(wrapper=True, specname="on_validation_end")
    def _on_validation_end(self, run: Run) -> Generator[None, Any, Any]:
        results = yield
        if self._on and run.stage == "validate":
            self._validated = True
            due = self._steps is None and not self._at_epoch_end and self._is_due(run)
            self._expected |= due
            if due or (self._retries and not self._at_epoch_end):
                self._check(run, run.epoch, due)
        return results

    @hookimpl(wrapper=True)
    def on_epoch_end(self, run: Run) -> Generator[None, Any, Any]:
        results = yield
        if self._on:
            self._expected |= self._validated or not run.stages["validate"].loaders
            due = self._steps is None and self._at_epoch_end and self._is_due(run)
            if due or self._retries:
                self._check(run, run.epoch + 1, due)
        return results

    @hookimpl
    def on_run_end(self, run: Run) -> None:
        if self._on:
            self._source = ""
            self._delete_old(run)
        if self._on and not self._looked and run.world.rank == 0:
            when = (
                f"every_n_epochs={self._epochs}"
                if self._steps is None
                else f"every_n_train_steps={self._steps}"
            )
            warn(
                f"geartrain-callbacks[model_checkpoint] saved nothing: {when}, "
                f"and the run had {run.epoch} epochs and {run.step} steps"
            )

    def _open_folder(self, run: Run) -> None:
        """Set the files with which this fit continues, on every rank to those rank 0 finds."""
        folder = self._folder(run.plan)
        assert folder is not None  # otherwise check_plan has raised
        if run.world.rank == 0:
            remove_abandoned(folder, SUFFIX, below="/" in self.filename)
            if self._continues(run, folder):
                self._drop_lost(folder)
                self._delete_leftovers(run, folder)
            else:
                self._start_from_scratch(run, folder)
            self._identity = self._identity or uuid4().hex
        self._planned = self._where = folder
        source = None if run.loop.resumed is None else run.loop.resumed.path
        name = "" if source is None else os.path.relpath(source.resolve(), folder.resolve())
        self._source = Path(name).as_posix()
        self._output = "" if run.output is None else str(run.output.resolve())
        if run.world.size > 1:
            self.load_state_dict(run.hooks.broadcast(run=run, obj=self.state_dict(), src=0))

    def _continues(self, run: Run, folder: Path) -> bool:
        """True if the named files belong to this run, not to a run in another folder."""
        if run.loop.resumed is None or run.loop.resumed.path is None:
            # A second fit, or a checkpoint in memory.
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

    def _drop_lost(self, folder: Path) -> None:
        """Forget files that no longer exist or that another run wrote."""
        names = dict.fromkeys(name for name in (self._best, self._last, *self._scores) if name)
        # The others of save_top_k=-1 are never deleted: do not read each of them.
        read = [name for name in names if self.save_top_k != -1 or name not in self._scores]
        read += [self._best] if self._best and self._best not in read else []
        lost = [name for name in names if name not in read and not (folder / name).exists()]
        lost += [name for name in read if not is_own(folder, name, self._identity)]
        if not lost:
            return
        warn(
            f"geartrain-callbacks[model_checkpoint]: {folder} no longer has {', '.join(lost)} "
            "of this run: removed from the list of the best"
        )
        self._scores = {name: score for name, score in self._scores.items() if name not in lost}
        self._last = "" if self._last in lost else self._last
        if self._best in lost:
            self._best = next(iter(self._ranked()), "")
            self.best_model_score = self._scores.get(self._best)

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
        if run.loop.resumed.path is None or _is_last(run.loop.resumed.path):
            remaining += written_after(
                folder, self._identity, (run.epoch, run.step, run.loop.resumed.batch_idx), kept
            )
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
        before = self.state_dict()
        self._remember(turn)  # before saving: the file's state must list the file itself
        try:
            if turn.last and run.world.rank == 0 and Path(self.last_model_path).is_symlink():
                Path(self.last_model_path).unlink()  # a writer may write through the link
            state = run.checkpoint(epochs) if names else {}
            for name in names:
                links = self.save_last == "link" and name == turn.last and turn.name != ""
                if not links or not self._link(run, name, turn.name):
                    run.save_checkpoint(state, Path(self._path(name)))
        except BaseException:
            self.load_state_dict(before)
            raise
        self._report_and_delete(run, turn)

    def _decide(self, run: Run, epochs: int, due: bool) -> _Decision:
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
            missing = ""
            if score is None:
                missing = not_logged("model_checkpoint", self.monitor, sorted(run.metrics))
                if self._expected:
                    return _Decision(error=f"{missing} {_FIX}")
            elif (
                when[0] == run.epoch
                and self._steps is not None
                and when[1] != run.step
                and epochs > run.epoch
            ):
                missing = (
                    f"geartrain-callbacks[model_checkpoint] monitors {self.monitor!r}, "
                    f"which was logged after step {when[1]}, "
                    f"and it checks every {self._steps} steps. Fix: log it in each step."
                )
            if missing or when[0] != run.epoch or (self._steps is not None and when[1] != run.step):
                return _Decision(last=last if due else "", missing=missing, retries=True)
        if not self._is_among_the_best(score):
            return _Decision(last=last)
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
            return _Decision(free(folder, name, drop), score, drop, last)
        except TrainingError as error:  # raised on all ranks by the caller
            return _Decision(error=str(error))

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

    def _remember(self, turn: _Decision) -> None:
        """Note the next file and the files that it replaces."""
        self._retries = turn.retries
        self._old += [
            name
            for name, new in ((turn.drop, turn.name), (self._last, turn.last))
            if new and name not in ("", new)
        ]
        self._last = turn.last or self._last
        if turn.name:
            self._scores.pop(turn.drop, None)
            if turn.score is None:
                self._best = turn.name
            else:
                self._scores.pop(turn.name, None)
                self._scores[turn.name] = turn.score
                self._best = next(iter(self._ranked()), "")
                self.best_model_score = self._scores.get(self._best)

    def _report_and_delete(self, run: Run, turn: _Decision) -> None:
        if turn.name and self.verbose:
            reason = "" if turn.score is None else f": {self.monitor} = {turn.score:.6g}"
            say(run, f"model_checkpoint: saved {self._path(turn.name)}{reason}.")
        self._delete_old(run)

    def _delete_old(self, run: Run) -> None:
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

    def _kth_best(self) -> str:
        ranked = self._ranked()
        return ranked[-1] if 0 < self.save_top_k <= len(ranked) else ""

    def _ranked(self) -> list[str]:
        """Return the files with a score, best first; of equal scores the older first."""
        scored = {name: score for name, score in self._scores.items() if not math.isnan(score)}
        return sorted(
            scored, key=lambda name: scored[name] if self.mode == "min" else -scored[name]
        )

    def _path(self, name: str) -> str:
        folder = self._where or self._planned
        return str(folder / name) if name and folder is not None else ""

    def _folder(self, plan: Plan) -> Path | None:
        if self.dirpath is not None:
            return Path(self.dirpath)
        return None if plan.output is None else plan.output / "checkpoints"

    # --- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "identity": self._identity,
            "output": self._output,
            "best_model_path": self._best,
            "best_model_score": self.best_model_score,
            "last_model_path": self._last,
            "best_k_models": dict(self._scores),
            "replaced": list(self._old),
            "owed": self._retries,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with these files.

        Raises:
            ValueError: a name leads out of the folder.
        """
        if state == self.state_dict():
            return
        best, last = (
            name and check_name(name)
            for name in (state["best_model_path"], state["last_model_path"])
        )
        scores = {check_name(name): float(score) for name, score in state["best_k_models"].items()}
        old = [check_name(name) for name in state["replaced"]]
        self._identity = str(state["identity"])
        self._output = str(state["output"])
        self.best_model_score = state["best_model_score"]
        self._best, self._last, self._scores, self._old = best, last, scores, old
        self._retries = bool(state.get("owed"))
        self._where = self._planned  # a fit in another process wrote its files to that folder


def _is_last(path: Path) -> bool:
    """True if a file has the name of a last checkpoint."""
    return re.fullmatch(r"last(-v\d+)?\.ckpt", path.name) is not None
