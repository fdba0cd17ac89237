"""Save and read checkpoints, together on all ranks, and find the file that ``"best"`` and ``"last"`` mean.

Parts rank and name their own files (``find_checkpoint``): the best are geartrain-callbacks' ModelCheckpoint's.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geartrain._version import __version__
from geartrain.checkpoint import files as checkpoint_file
from geartrain.checkpoint.training_state import load_training_state, refuse, training_state
from geartrain.errors import TrainingError, UsageError
from geartrain.files.atomic import make_folder, reason
from geartrain.files.paths import user_path
from geartrain.launch.cluster import detect
from geartrain.module.module import overridden

if TYPE_CHECKING:
    from geartrain.hooks.manager import Hooks
    from geartrain.loop.run import Run

#: The checkpoint that the run's folder gets after each epoch.
LAST = "last.ckpt"


def checkpoint_state(run: Run, epochs: int) -> dict[str, Any]:
    """Return the contents of a checkpoint: weights, counters, during ``fit`` everything that it needs to resume, and the additions of the
    module's ``on_save_checkpoint``. Every rank calls this, and rank 0's is saved.

    Args:
        epochs: epochs done: ``run.epoch`` within an epoch, one more in ``on_epoch_end``.
    """
    state: dict[str, Any] = {"geartrain": __version__, "step": run.step, "epoch": epochs}
    # First: a strategy whose thread changes weights pauses the thread when it returns its state.
    fit = training_state(run, epochs) if run.command == "fit" and run.mode != "session" else None
    state["model"] = run.module.state_dict()
    if fit is not None:
        state["fit"] = fit
    if overridden(run.module, "on_save_checkpoint"):
        run.module.on_save_checkpoint(state)
    return state


def save_checkpoint_file(run: Run, state: dict[str, Any], path: Path) -> None:
    """Save a checkpoint and call ``on_checkpoint_saved``. Every rank calls this, with the same path.

    A checkpoint that a plugin writes says which plugin that was: the same plugin may be needed to read it.

    Raises:
        TrainingError: it could not be written.
    """
    if run.world.rank == 0:
        try:
            make_folder(path.parent)
        except OSError as error:
            raise TrainingError(reason(path, error)) from error
    owner = run.hooks.owner("save_checkpoint")
    if owner is not None and not owner.is_core:
        state = {**state, "saved_by": {"name": owner.name, "distribution": owner.distribution}}
    run.hooks.save_checkpoint(run=run, state=state, path=path)
    if run.world.size > 1:
        run.hooks.barrier(
            run=run
        )  # one rank writes: only now it is whole for those that return at once
    run.hooks.on_checkpoint_saved(run=run, path=path)


def read(run: Run, path: Path) -> dict[str, Any]:
    """Read a checkpoint that core can read: its own, or one of a plugin that leaves reading to core.

    Raises:
        UsageError: there is no such file.
        TrainingError: it is damaged, is no checkpoint, or a plugin wrote it that this run does not have.
    """
    state = checkpoint_file.read(path)
    writer = state.get("saved_by") if isinstance(state, dict) else None
    if isinstance(writer, dict) and all(
        part.info.name != writer["name"] for part in run.hooks.parts
    ):
        label = (
            f"{writer['distribution']}[{writer['name']}]"
            if writer["distribution"]
            else writer["name"]
        )
        raise TrainingError(
            f"{path} was written by the plugin {label}, which this run does not have. Fix: select {label} again"
        )
    return state


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a run."""

    #: A checkpoint, or ``None``.
    path: Path | None = None
    #: True if ``fit`` resumes with everything in it, not with its weights alone.
    resumes: bool = False


def load(run: Run, start: Start) -> None:
    """Read a checkpoint's weights into the module and, if the run resumes, everything else to where it belongs.

    ``run.memory_checkpoint`` goes before any file.

    Raises:
        TrainingError: it is damaged, is no checkpoint, or does not fit.
        UsageError: it resumes, and there is nothing left to do.
    """
    if run.memory_checkpoint is not None:
        start = Start(Path("the last commit"), resumes=True)
    path = start.path
    if path is None:
        return
    state = (
        run.hooks.load_checkpoint(run=run, path=path)
        if run.memory_checkpoint is None
        else run.memory_checkpoint
    )
    if not isinstance(state, dict) or "model" not in state:
        raise TrainingError(f"{path} is not a checkpoint of geartrain: it has no 'model'.")
    if start.resumes:
        refuse(run, state, path)
    weights, trained = state["model"], state.get("trained")
    if start.resumes and isinstance(trained, dict) and trained.keys() == weights.keys():
        weights = trained  # the others are an average: see callbacks/ema.py
    try:
        run.module.load_state_dict(weights)
    except (RuntimeError, TypeError) as error:
        raise TrainingError(f"{path} does not fit {type(run.module).__name__}: {error}") from error
    if start.resumes:
        load_training_state(run, state["fit"], path)
    if overridden(run.module, "on_load_checkpoint"):
        run.module.on_load_checkpoint(state)


# --- which file "best" and "last" mean -----------------------------------------------------------------------------------


def find_checkpoint_file(
    given: str | Path | None, hooks: Hooks, output: Path | None, resumes: bool = False
) -> Path | None:
    """Return the file that ``ckpt_path=`` means, or ``None`` for none.

    Args:
        given: ``"best"``, ``"last"``, a file or ``None``; if the run resumes, also ``"auto"``: the last, if one exists.
        hooks: the trainer's.
        output: the run's folder.

    Raises:
        UsageError: there is none, or there are several.
        TrainingError: ``"last"`` or ``"auto"``, and all are damaged.
    """
    if given is None or (resumes and given == "auto"):
        return None if given is None else newest_last(hooks, output)
    path = (
        _best(hooks, output)
        if given == "best"
        else _last(hooks, output, resumes)
        if given == "last"
        else user_path(given, "ckpt_path or checkpoint")
    )
    if path.is_file():
        return path
    if path.is_dir():
        files = sorted(str(file.relative_to(path)) for file in path.rglob("*.ckpt"))
        raise UsageError(
            f"{path} is a folder, not a checkpoint. Fix: one of its files"
            + (f": {', '.join(files[:8])}" if files else "")
        )
    what = (
        f"the best checkpoint, {path}, no longer exists"
        if given == "best"
        else f"there is no checkpoint {path}"
    )
    raise UsageError(f"{what}. Fix: pass an existing file")


def best_checkpoints(hooks: Hooks, output: Path | None) -> list[Path]:
    """Return the best checkpoints that plugins have saved: one for each plugin that has saved any."""
    return list(chain.from_iterable(hooks.find_checkpoint(which="best", output=output)))


def _best(hooks: Hooks, output: Path | None) -> Path:
    found = best_checkpoints(hooks, output)
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(
            f"'best' may be {' or '.join(map(str, reversed(found)))}. Fix: give one of these files"
        )
    if all(choice.is_core for choice in hooks.implementers("find_checkpoint")):
        raise UsageError(
            "'best' is known to the trainer that found it, and this trainer has no ModelCheckpoint. "
            "Fix: plugins=[ModelCheckpoint(monitor=...)] of geartrain.callbacks, or give a file"
        )
    raise UsageError(
        "this trainer has saved no checkpoint that could be the best. Fix: fit first, with save_top_k other than 0"
    )


def _last(hooks: Hooks, output: Path | None, resumes: bool) -> Path:
    newest = newest_last(hooks, output)
    if newest is None:
        where = "" if output is None else f", and {str(output)!r} holds none"
        more = (
            "; or ckpt_path='auto' (--resume auto), which starts from scratch if nothing was saved"
            if resumes
            else ""
        )
        raise UsageError(
            f"this trainer has saved no last checkpoint{where}. Fix: fit first, with a folder for the run (output=DIR) or "
            f"plugins=[ModelCheckpoint(save_last=True)] of geartrain.callbacks; or give a file{more}"
        )
    return newest


def is_last(path: Path) -> bool:
    """True if a file is called as ``save_last`` and the run's folder call the last checkpoint."""
    return re.fullmatch(r"last(-v\d+)?\.ckpt", path.name) is not None


def newest_last(hooks: Hooks, output: Path | None) -> Path | None:
    """Return the newest whole last checkpoint that the run's folder or a plugin has.

    Without one, return the furthest whole checkpoint of theirs from which a ``fit`` can resume; ``None`` if nothing was saved.

    Raises:
        TrainingError: something was saved, and all of it is damaged.
    """
    # The folder's first, which comes last: of two in one tick of the clock, an epoch's end is the later.
    lasts = list(chain.from_iterable(reversed(hooks.find_checkpoint(which="last", output=output))))
    owner = hooks.owner("load_checkpoint")
    if owner is not None and owner.kind != "default":  # only it knows whether a file is whole
        return next(iter(_newest_first(lasts)), None)
    damaged: list[Path] = []
    others = dict.fromkeys(chain.from_iterable(hooks.find_checkpoint(which="any", output=output)))
    for path in chain(_newest_first(lasts), _furthest_first(others)):
        if _is_whole(path):
            if damaged or path not in lasts:
                _warn_of(damaged, path)
            return path
        damaged += [path] if path not in damaged else []
    if damaged:
        raise TrainingError(
            f"all checkpoints of this run are damaged: {', '.join(map(str, damaged))}. "
            "Fix: ckpt_path= a copy of one, or start from scratch in another folder"
        )
    return None


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    return sorted(
        (path for path in paths if path.is_file()),
        key=lambda path: path.stat().st_mtime_ns,
        reverse=True,
    )


def _furthest_first(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the checkpoints from which a fit can resume, by what they hold, as one may be a copy; then damaged ones."""
    found = {path: checkpoint_file.peek(path) for path in paths}
    fits = {path: checkpoint_file.progress(fit) for path, fit in found.items() if fit}
    yield from sorted(fits, key=lambda path: fits[path], reverse=True)
    for path in (path for path in found if path not in fits):
        try:
            checkpoint_file.check(path)  # weights alone, or a file of the user's
        except TrainingError:
            yield path


def _is_whole(path: Path) -> bool:
    try:
        return checkpoint_file.check(path)
    except (TrainingError, UsageError):
        return False


def _warn_of(damaged: list[Path], used: Path) -> None:
    place = detect()
    if place is None or place.rank == 0:
        names = ", ".join(map(str, damaged))
        why = (
            f"damaged, or saved by another program: {names}"
            if damaged
            else "the run was stopped before it saved a last checkpoint"
        )
        warnings.warn(f"{why}. Used instead: {used}, the newest that is whole", stacklevel=2)
