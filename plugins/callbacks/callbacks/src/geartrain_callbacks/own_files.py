"""Files of ``model_checkpoint`` in its folder: find those that it wrote, and delete them.

A checkpoint lists file names, so names are untrusted data: a name that leads out of the folder is
refused, and no link is followed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Container, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from geartrain.plugin_api import warn
from geartrain_callbacks.checkpoint_names import SUFFIX, is_inside

#: Keys of a ModelCheckpoint's state, used to recognise it.
_KEYS = {"identity", "best_model_path", "last_model_path", "best_k_models"}


def check_name(name: Any) -> str:
    """Return the name if it is valid.

    Raises:
        ValueError: it is not the name of a checkpoint inside the folder.
    """
    if not isinstance(name, str) or not name.endswith(SUFFIX) or not is_inside(name):
        raise ValueError(f"{name!r} is no name of a checkpoint inside the folder")
    return name


def is_own(folder: Path, name: str, identity: str) -> bool:
    """True if the folder has this file and no other run wrote it.

    The state in a file of a strategy's own format cannot be read; such a file counts as own.
    """
    path = folder / name
    if not path.exists() or not path.resolve().is_relative_to(folder.resolve()):
        return False
    states = _states_in(path)
    return not states or any(state["identity"] == identity for state in states)


def written_after(
    folder: Path, identity: str, after: tuple[int, int, int], known: Container[str]
) -> Iterator[str]:
    """Yield the names of files that the ModelCheckpoint of this identity saved after a progress.

    A checkpoint lists itself among its files, so a user's copy under another name is not yielded.

    Args:
        after: epochs, steps, and batches of the epoch.
        known: names to skip.
    """
    for path in sorted(folder.rglob(f"*{SUFFIX}")):
        name = path.relative_to(folder).as_posix()
        if name in known or (_progress_in(_fit_in(path)) or after) <= after:
            continue
        for state in _states_in(path):
            if state["identity"] == identity and name in (
                state["best_model_path"],
                state["last_model_path"],
                *state["best_k_models"],
            ):
                yield name
                break


def best_of(folder: Path, last: Path, monitor: str | None) -> str:
    """Return the name of the best file that a ModelCheckpoint of another process left; or ``""``.

    Args:
        folder: the folder of its files.
        last: the run's last checkpoint, which has its newest state.
        monitor: its metric: a run may have several.
    """
    files = [path for path in folder.rglob(f"*{SUFFIX}") if path.is_file()]
    files.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in (last, *files):
        for state in _states_in(path):
            name = state["best_model_path"]
            with suppress(ValueError):
                is_other = state.get("monitor", monitor) != monitor
                if not is_other and name and (folder / check_name(name)).is_file():
                    return str(name)
    return ""


def delete(folder: Path, name: str) -> None:
    """Delete one file of the folder; for a link, delete the link."""
    path = folder / name
    try:
        if not path.parent.resolve().is_relative_to(folder.resolve()):
            raise OSError(f"it lies outside {folder}")
        if path.is_dir() and not path.is_symlink():  # a strategy may save a folder
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:  # a leftover file is no reason to end training
        warn(f"geartrain-callbacks[model_checkpoint]: {path} could not be deleted: {error}")


def link(path: Path, target: Path) -> bool:
    """Make ``path`` a relative link to a file; return ``False``, with a warning, if none can be."""
    new = path.with_name(f".{path.name}.link")
    try:
        new.unlink(missing_ok=True)
        new.symlink_to(os.path.relpath(target, path.parent))
        os.replace(new, path)
    except (OSError, NotImplementedError) as error:
        message = f"geartrain-callbacks[model_checkpoint]: {path} cannot be a link ({error})"
        warn(f"{message}, so it is a file")
        return False
    return True


def _states_in(path: Path) -> list[dict[str, Any]]:
    """Return the ModelCheckpoint states in a file; none if it cannot be read."""
    with suppress(KeyError, TypeError, AttributeError):
        fit = _fit_in(path)
        parts = [fit["parts"], *(rank["parts"] for rank in fit["ranks"])]
        return [
            state
            for part in parts
            for state in part.values()
            if isinstance(state, dict) and state.keys() >= _KEYS
        ]
    return []


def _fit_in(path: Path) -> dict[str, Any]:
    """Return the state that a ``fit`` resumes from, empty if the file has none; read no tensors."""
    with suppress(Exception):  # a user's file may be anything
        return dict(torch.load(path, map_location="cpu", weights_only=True, mmap=True)["fit"])
    return {}


def _progress_in(fit: dict[str, Any]) -> tuple[int, int, int] | None:
    """Return epochs, steps, and batches of the epoch."""
    with suppress(KeyError, TypeError, ValueError):
        return int(fit["epoch"]), int(fit["step"]), int(fit["batch_idx"])
    return None
