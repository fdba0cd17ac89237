"""``trainer.save_checkpoint``: a file of the running or the last run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from geartrain import Run, UsageError, World
from geartrain.plugin_api import RankCoordinator, user_path, warn

_NAME = "trainer.save_checkpoint"


class _RankZero(RankCoordinator):
    """Rank 0 of several, when the others cannot be asked: their random state is missing.

    Args:
        size: the number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def gather_states(self, run: Run, local: dict[str, Any]) -> list[dict[str, Any]]:
        """Return rank 0's state, and for each other rank one with the metrics alone."""
        known = {
            "parts": {},
            "random": None,
            "began": None,
            "logs": {**local["logs"], "epoch": None},
        }
        return [local, *(dict(known) for _ in range(self.size - 1))]


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
    saved, lost = (_counted(run), "") if active else of_rank_0(run)
    if not active and run.loop.failure is None:
        saved.batch_idx = 0  # the last epoch is done
    state = saved.checkpoint(saved.epoch, weights_only)
    if not weights_only and run.world.rank == 0:
        if lost:
            _warn(file, lost, _EARLIER)
        elif run.command != "fit":
            _warn(file, f"the last run was {run.command}", "call it in or after fit")
        elif active and _is_within_step(saved):
            warn(
                f"{_NAME}: {file} is saved within a step, on whose batches a resumed run trains "
                "again: their metrics, buffers and random numbers will differ from those of one "
                "run. Fix: call it after the step, in on_train_batch_end of its last batch"
            )
    saved.save_checkpoint(state, file)


def drop_fit(state: dict[str, Any], file: Path, reason: str) -> None:
    """Leave the state to resume from out of a checkpoint, with a warning.

    Args:
        state: the contents of the checkpoint.
        file: its file.
        reason: why it is lost after ``fit``.
    """
    if state.pop("fit", None) is not None:
        _warn(file, reason, _EARLIER)


#: What to do about a state that ends with ``fit``.
_EARLIER = "call it in on_train_end, or give the run a folder (output=DIR)"


def _warn(file: Path, reason: str, hint: str) -> None:
    message = f"{file} has the weights, but not the state to resume from: {reason}"
    warn(f"{message}. Fix if unmeant: {hint}; otherwise weights_only=True")


def of_rank_0(run: Run) -> tuple[Run, str]:
    """Return a run that rank 0 can save without the other ranks, and why it has only weights.

    The reason is empty if a ``fit`` can resume from the file.
    """
    alone, size = _counted(run), run.world.data_size
    alone.world, alone.coordinator = World(), _RankZero(size)
    for part in run.hooks.parts:
        keeps_state = callable(getattr(part.plugin, "state_dict", None))
        if part.info.kind == "strategy" and keeps_state and size > 1:
            alone.command = "validate"  # its state_dict() may need all ranks
            return alone, f"each rank has state of {part.info.label}"
    return alone, ""


def _is_within_step(counted: Run) -> bool:
    """True from the start of a step's first batch until its optimizers have stepped."""
    trains = counted.stage == "train" and counted.batch is not None
    return trains and counted.loop.stepped <= counted.batch_idx and counted.mode != "session"


def _counted(run: Run) -> Run:
    """Return a copy of a run whose counters include the step before ``on_train_batch_end``."""
    counted = copy.copy(run)
    if run.command == "fit" and run.loop.stepped > run.batch_idx:
        counted.step, counted.batch_idx = run.step + 1, run.loop.stepped
    return counted
