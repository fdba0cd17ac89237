"""``trainer.save_checkpoint``: a file of the running or the last run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from geartrain import Run, UsageError, World
from geartrain.plugin_api import RankCoordinator, user_path, warn

_NAME = "trainer.save_checkpoint"


def save(run: Run | None, path: str | Path, weights_only: bool) -> None:
    """Write a checkpoint; see :meth:`TrainerView.save_checkpoint`."""
    file = user_path(path, _NAME)
    if run is None or not hasattr(run, "logs"):
        hint = "call it in a hook of a run, or after one"
        raise UsageError(f"{_NAME}: this trainer has not run anything. Fix: {hint}")
    if file.is_dir():
        raise UsageError(f"{_NAME}: {file} is a folder. Fix: name a file in it")
    active = run.module._run is run
    if not active and run.world.rank != 0:
        return  # the process group has ended with the run
    alone = _counted(run) if active else _ended(run)
    state = alone.checkpoint(alone.epoch)
    if weights_only:
        state.pop("fit", None)
    elif run.command != "fit" and run.world.rank == 0:
        _warn(file, f"the last run was {run.command}", "call it in or after fit")
    elif not active:
        for part in run.hooks.parts:
            keeps_state = callable(getattr(part.plugin, "state_dict", None))
            if part.info.kind == "strategy" and keeps_state and run.world.size > 1:
                drop_fit(state, file, f"the ranks' state of {part.info.label} ends with fit")
    alone.save_checkpoint(state, file)


def drop_fit(state: dict[str, Any], file: Path, reason: str) -> None:
    """Leave the state to resume from out of a checkpoint, with a warning.

    Args:
        state: the contents of the checkpoint.
        file: its file.
        reason: why it is lost after ``fit``.
    """
    if state.pop("fit", None) is not None:
        _warn(file, reason, "call it in on_train_end, or give the run a folder (output=DIR)")


def _warn(file: Path, reason: str, hint: str) -> None:
    message = f"{file} has the weights, but not the state to resume from: {reason}"
    warn(f"{message}. Fix if unmeant: {hint}; otherwise weights_only=True")


def _counted(run: Run) -> Run:
    """Return a run whose counters include the step before ``on_train_batch_end``."""
    if run.command != "fit" or run.batch is None or run.loop.stepped <= run.batch_idx:
        return run
    counted = copy.copy(run)
    counted.step, counted.batch_idx = run.step + 1, run.loop.stepped
    return counted


def _ended(run: Run) -> Run:
    """Return a run that has ended, as that of its rank 0 alone: the other ranks have left."""
    alone = copy.copy(run)
    alone.world, alone.coordinator = World(), RankCoordinator()
    if run.loop.failure is None:
        alone.batch_idx = 0  # the last epoch is done
    return alone
