"""Checkpoints: what one holds, how all ranks save it together, how its weights are read, and which are ``"best"`` and ``"last"``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geartrain._version import __version__
from geartrain.errors import TrainingError, UsageError
from geartrain.module import overridden
from geartrain.parts import Part
from geartrain.run import Run

if TYPE_CHECKING:
    from geartrain.callbacks.model_checkpoint import ModelCheckpoint

#: The checkpoint that the run's folder gets after each epoch.
LAST = "last.ckpt"


def checkpoint_state(run: Run, epochs: int) -> dict[str, Any]:
    """What a checkpoint holds: the module's weights, the counters, and what the module's ``on_save_checkpoint`` adds.

    Args:
        epochs: epochs done.
    """
    state = {"geartrain": __version__, "step": run.step, "epoch": epochs, "model": run.module.state_dict()}
    if overridden(run.module, "on_save_checkpoint"):
        run.module.on_save_checkpoint(state)
    return state


def save(run: Run, state: dict[str, Any], path: Path) -> None:
    """Save a checkpoint and tell plugins of it. Every rank calls this, with the same path."""
    if run.world.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
    run.hooks.save_checkpoint(run=run, state=state, path=path)
    if run.world.size > 1:
        run.hooks.barrier(run=run)  # one rank writes: only now it is whole for those that return at once
    if run.hooks.on_checkpoint_saved is not None:
        run.hooks.on_checkpoint_saved(run=run, path=path)


def load_weights(run: Run, path: Path) -> None:
    """Read a checkpoint's weights into the module.

    Raises:
        TrainingError: it is no checkpoint, or belongs to another model.
    """
    state = run.hooks.load_checkpoint(run=run, path=path)
    if not isinstance(state, dict) or "model" not in state:
        raise TrainingError(f"{path} is not a checkpoint of geartrain: it has no 'model'.")
    try:
        run.module.load_state_dict(state["model"])
    except (RuntimeError, TypeError) as error:
        raise TrainingError(f"{path} does not fit {type(run.module).__name__}: {error}") from error
    if overridden(run.module, "on_load_checkpoint"):
        run.module.on_load_checkpoint(state)


# --- which one -----------------------------------------------------------------------------------------------------------


def find(given: str | Path, parts: Iterable[Part], output: Path | None) -> Path:
    """The file that ``ckpt_path=`` means.

    Args:
        given: ``"best"``, ``"last"`` or a file.
        parts: the trainer's.
        output: the run's folder.

    Raises:
        UsageError: there is none, or there are several.
    """
    named = given in ("best", "last")
    path = Path(given) if not named else _best(parts) if given == "best" else _last(parts, output)
    if path.is_file():
        return path
    what = f"there is no checkpoint {path}"
    if path.is_dir():
        files = sorted(str(file.relative_to(path)) for file in path.rglob("*.ckpt"))
        what = f"{what}: it is a folder. Fix: one of its files" + (f": {', '.join(files[:8])}" if files else "")
    elif named:
        what = f"{what}, which is the {given} that was saved. Fix: give a file that is there"
    raise UsageError(what)


def model_checkpoints(parts: Iterable[Part]) -> list[ModelCheckpoint]:
    """The trainer's ``ModelCheckpoint`` plugins, in the order given."""
    from geartrain.callbacks.model_checkpoint import ModelCheckpoint  # its own imports include this file

    return [part.plugin for part in parts if isinstance(part.plugin, ModelCheckpoint)]


def _best(parts: Iterable[Part]) -> Path:
    those = model_checkpoints(parts)
    if not those:
        raise UsageError(
            "'best' is what this trainer's own fit found, and it has no ModelCheckpoint. "
            "Fix: plugins=[ModelCheckpoint(monitor=...)] of geartrain.callbacks, or give a file"
        )
    if len(those) > 1:
        raise UsageError(f"'best' may be of {', '.join(map(repr, those))}. Fix: give the best_model_path of one")
    if not those[0].best_model_path:
        raise UsageError(f"{those[0]!r} has saved no checkpoint that could be the best. Fix: fit first, with save_top_k other than 0")
    return Path(those[0].best_model_path)


def _last(parts: Iterable[Part], output: Path | None) -> Path:
    paths = [] if output is None else [output / LAST]  # first: of two in one tick of the clock, an epoch's end is the later
    paths += [Path(one.last_model_path) for one in model_checkpoints(parts) if one.last_model_path]
    there = [path for path in paths if path.is_file()]
    if not there:
        raise UsageError(
            "this trainer has saved no last checkpoint. Fix: fit first, with a folder for the run (output=DIR) or "
            "plugins=[ModelCheckpoint(save_last=True)] of geartrain.callbacks; or give a file"
        )
    return max(there, key=lambda path: path.stat().st_mtime_ns)
