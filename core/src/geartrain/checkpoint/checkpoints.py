"""Save and read checkpoints on all ranks, and find the files that ``"best"`` and ``"last"`` mean.

Parts rank and name their own files (``find_checkpoint``), as ModelCheckpoint ranks the best.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geartrain._version import __version__
from geartrain.checkpoint import files as checkpoint_file
from geartrain.checkpoint.training_state import check_resumable, load_training_state, training_state
from geartrain.errors import TrainingError, UsageError, warn
from geartrain.errors.distributions import import_optional
from geartrain.files.atomic import make_folder, reason
from geartrain.files.paths import user_path
from geartrain.launch.cluster import detect
from geartrain.module.module import match_names, overridden, plain_name

if TYPE_CHECKING:
    from geartrain.hooks.manager import Hooks
    from geartrain.loop.run import Run

#: The checkpoint that is saved in the run's folder after each epoch.
LAST = "last.ckpt"


def checkpoint_state(run: Run, epochs: int, weights_only: bool) -> dict[str, Any]:
    """Return the contents of a checkpoint; see :meth:`geartrain.Run.checkpoint`."""
    state: dict[str, Any] = {"geartrain": __version__, "step": run.step, "epoch": epochs}
    # As text: a subclass of float or str among its values could not be read as data alone.
    state["plan"] = json.dumps(run.plan.as_dict())
    # Before the weights: a strategy whose thread changes them pauses it when it returns its state.
    if run.command == "fit" and run.mode != "session" and not weights_only:
        state["fit"] = training_state(run, epochs)
    state["model"] = run.hooks.model_state(run=run)
    if hyperparameters := import_optional("geartrain_callbacks.hyperparameters"):
        state |= hyperparameters.description(run.module)
    if overridden(run.module, "on_save_checkpoint"):
        run.module.on_save_checkpoint(state)
    return state


def save_checkpoint_file(run: Run, state: dict[str, Any], path: Path) -> None:
    """Save a checkpoint; see :meth:`geartrain.Run.save_checkpoint`."""
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
        run.hooks.barrier(run=run)  # ranks that do not write wait until the file is whole
    run.hooks.on_checkpoint_saved(run=run, path=path)


def read(run: Run, path: Path) -> dict[str, Any]:
    """Read a checkpoint of core, or of a plugin that leaves reading to core.

    Raises:
        UsageError: the file does not exist.
        TrainingError: it is damaged, is no checkpoint, or is of a plugin that this run lacks.
    """
    state = checkpoint_file.read(path)
    writer = state.get("saved_by") if isinstance(state, dict) else None
    names = [part.info.name for part in run.hooks.parts]
    if isinstance(writer, dict) and writer["name"] not in names:
        name, home = writer["name"], writer["distribution"]
        label = f"{home}[{name}]" if home else name
        raise TrainingError(
            f"{path} was written by the plugin {label}, which this run does not have. "
            f"Fix: select {label} again"
        )
    return state


@dataclass(frozen=True, slots=True)
class InitialCheckpoint:
    """The start of a run."""

    #: A checkpoint, or ``None``.
    path: Path | None = None
    #: True if ``fit`` resumes with everything in it, False if it reads only the weights.
    resumes: bool = False
    #: True if the checkpoint may be that of a finished ``fit``. Then nothing is trained.
    may_be_done: bool = False


def load(run: Run, start: InitialCheckpoint) -> None:
    """Load a checkpoint's weights and, if the run resumes, all the rest of it.

    ``run.loop.memory_checkpoint`` is used before any file.

    Raises:
        TrainingError: it is damaged, is no checkpoint, or does not fit.
        UsageError: the run resumes a finished one, which ``start`` does not allow.
    """
    state: Any = run.loop.memory_checkpoint
    if state is not None:
        start = InitialCheckpoint(Path("the checkpoint in memory"), resumes=True, may_be_done=True)
    path = start.path
    if path is None:
        return
    if state is None:
        state = run.hooks.load_checkpoint(run=run, path=path)
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise TrainingError(f"{path} is not a checkpoint of geartrain: it has no 'model'.")
    if start.resumes:
        check_resumable(run, state, path, start.may_be_done)
    trained = state.get("trained")
    if start.resumes and isinstance(trained, dict) and trained.keys() == state["model"].keys():
        state["model"] = trained  # the others are an average: geartrain-callbacks' ema
    if overridden(run.module, "on_load_checkpoint"):
        before = dict(state["model"])
        run.module.on_load_checkpoint(state)
        names = {id(weight): plain_name(name) for name, weight in state["model"].items()}
        renamed = {plain_name(name): names.get(id(weight)) for name, weight in before.items()}
        for saved in state["fit"]["optimizers"] if start.resumes else ():
            saved["parameters"] = [renamed.get(name) or name for name in saved["parameters"]]
    match_names(state["model"], run.module)
    try:
        run.hooks.load_model_state(run=run, state=state["model"])
    except (RuntimeError, TypeError) as error:
        raise TrainingError(f"{path} does not fit {type(run.module).__name__}: {error}") from error
    if start.resumes:
        load_training_state(run, state["fit"], path)


def find_checkpoint_file(
    given: str | Path | None, hooks: Hooks, output: Path | None, resumes: bool = False
) -> Path | None:
    """Return the file that ``ckpt_path=`` means, or ``None``.

    Args:
        given: ``"best"``, ``"last"``, a file or ``None``; if the run resumes, also ``"auto"``: the
            last, if one exists.
        hooks: the trainer's.
        output: the run's folder.
        resumes: True for ``ckpt_path`` of ``fit``.

    Raises:
        UsageError: no such file exists, or several do.
        TrainingError: ``"last"`` or ``"auto"``, and all are damaged.
    """
    if given is None or (resumes and given == "auto"):
        return None if given is None else newest_last(hooks, output)
    if given == "best":
        path = _best(hooks, output)
    elif given == "last":
        path = _last(hooks, output, resumes)
    else:
        path = user_path(given, "ckpt_path or checkpoint", reads=True)
    if path.is_file():
        return path
    if path.is_dir():
        files = sorted(str(file.relative_to(path)) for file in path.rglob("*.ckpt"))
        hint = f"use one of its files: {', '.join(files[:8])}" if files else "use one of its files"
        raise UsageError(f"{path} is a folder, not a checkpoint. Fix: {hint}")
    message = f"there is no checkpoint {path}"
    if given == "best":
        message = f"the best checkpoint, {path}, no longer exists"
    raise UsageError(f"{message}. Fix: pass an existing file")


def best_checkpoints(hooks: Hooks, output: Path | None) -> list[Path]:
    """Return the best checkpoint of each plugin that has saved any."""
    return list(chain.from_iterable(hooks.find_checkpoint(which="best", output=output)))


def _best(hooks: Hooks, output: Path | None) -> Path:
    found = best_checkpoints(hooks, output)
    if len(found) == 1:
        return found[0]
    if found:
        files = " or ".join(map(str, reversed(found)))
        raise UsageError(f"'best' may be {files}. Fix: give one of these files")
    raise UsageError(
        "this trainer has saved no checkpoint that could be the best. Fix: fit first, with "
        "plugins=[ModelCheckpoint(monitor=...)] of geartrain.callbacks; or give a file"
    )


def _last(hooks: Hooks, output: Path | None, resumes: bool) -> Path:
    newest = newest_last(hooks, output)
    if newest is None:
        where = "" if output is None else f", and {str(output)!r} holds none"
        auto = "ckpt_path='auto' (--resume auto), which starts from scratch if nothing was saved"
        more = f"; or {auto}" if resumes else ""
        raise UsageError(
            f"this trainer has saved no last checkpoint{where}. Fix: fit first, with a folder for "
            "the run (output=DIR) or plugins=[ModelCheckpoint(save_last=True)] of "
            f"geartrain.callbacks; or give a file{more}"
        )
    return newest


def newest_last(hooks: Hooks, output: Path | None) -> Path | None:
    """Return the newest whole last checkpoint that the run's folder or a plugin has.

    If none exists, return the furthest whole checkpoint of theirs from which a ``fit`` can resume;
    ``None`` if nothing was saved.

    Raises:
        TrainingError: all saved checkpoints are damaged.
    """
    # Reversed: the folder's comes first. It is the newer of two that have the same time.
    lasts = list(chain.from_iterable(reversed(hooks.find_checkpoint(which="last", output=output))))
    owner = hooks.owner("load_checkpoint")
    if owner is not None and owner.kind != "default":  # only it knows whether a file is whole
        return next(iter(_newest_first(lasts)), None)
    damaged: list[Path] = []
    others = dict.fromkeys(chain.from_iterable(hooks.find_checkpoint(which="any", output=output)))
    for path in chain(_newest_first(lasts), _furthest_first(others)):
        with suppress(TrainingError, UsageError):
            if checkpoint_file.check(path):
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
    files = (path for path in paths if path.is_file())
    return sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def _furthest_first(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield damaged checkpoints, then those from which a fit can resume, most steps first."""
    found = {path: checkpoint_file.progress(path) for path in paths}
    fits = {path: progress for path, progress in found.items() if progress is not None}
    for path in (path for path in found if path not in fits):
        try:
            checkpoint_file.check(path)  # only weights, or a user's file
        except TrainingError:
            yield path
    yield from sorted(fits, key=lambda path: fits[path], reverse=True)


def _warn_of(damaged: list[Path], used: Path) -> None:
    if (place := detect()) is None or place.rank == 0:
        cause = "the run was stopped before it saved a last checkpoint"
        if damaged:
            cause = f"damaged, or saved by another program: {', '.join(map(str, damaged))}"
        warn(f"{cause}. Used instead: {used}, the newest complete checkpoint")
