"""Read checkpoints as data alone, and find them in folders. Their contents are not trusted.

Tensors are mapped from the file, so that a command that needs only their names reads no weights.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from geartrain import TrainingError, UsageError
from geartrain.plugin_api import nearest, user_path

SUFFIX = ".ckpt"
#: The version of the format under ``"fit"`` that this package knows.
FORMAT = 1
#: Values nested deeper than this are no checkpoint's.
_DEPTH = 100
#: Keys of a ModelCheckpoint's state, used to recognise it.
_KEYS = {"identity", "best_model_path", "last_model_path", "best_k_models"}
#: The comment of an archive that geartrain wrote: epochs, steps, and batches of the epoch.
_COMMENT = re.compile(rb"geartrain (\d*) (\d*) (\d*)\n")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the run was that saved a checkpoint; compared from left to right."""

    epoch: int
    step: int
    batch_idx: int

    @property
    def key(self) -> tuple[int, int, int]:
        """The value to sort by."""
        return self.epoch, self.step, self.batch_idx


def find_file(given: str) -> Path:
    """Return the checkpoint that an argument names.

    Raises:
        UsageError: it does not exist, or is a folder.
    """
    path = user_path(given, "PATH", reads=True)
    if path.is_dir():
        names = [str(file.relative_to(path)) for file in files_in(path)]
        hint = f"use one of its files: {', '.join(names[:8])}" if names else "use a file"
        raise UsageError(f"{path} is a folder, not a checkpoint. Fix: {hint}")
    if not path.is_file():
        siblings = [file.name for file in files_in(path.parent)] if path.parent.is_dir() else []
        hint = nearest(path.name, siblings)
        hint = f"{hint} " if hint.startswith("Did") else ""
        raise UsageError(f"there is no checkpoint {path}. {hint}Fix: pass an existing file")
    return path


def find_files(given: str) -> list[Path]:
    """Return the checkpoint that an argument names, or those in a folder.

    Raises:
        UsageError: it does not exist, or is a folder without a checkpoint.
    """
    folder = user_path(given, "PATH", reads=True)
    if not folder.is_dir():
        return [find_file(given)]
    if found := files_in(folder):
        return found
    raise UsageError(
        f"{folder} has no checkpoint: no file ends in {SUFFIX}. Fix: pass the folder that fit got "
        "as --output"
    )


def files_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder and in those below it; hidden ones are half written."""
    found = (path for path in folder.rglob(f"*{SUFFIX}") if not path.name.startswith("."))
    return sorted(path for path in found if path.is_file())


def progress_in(path: Path) -> Progress | None:
    """Return the progress in the comment of a file's archive; ``None`` if it has none."""
    with suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        return parsed(archive.comment)
    return None


def parsed(comment: bytes) -> Progress | None:
    """Return the progress that an archive's comment has."""
    found = _COMMENT.fullmatch(comment)
    if found is None or not all(found.groups()):
        return None
    epoch, step, batch_idx = map(int, found.groups())
    return Progress(epoch, step, batch_idx)


def is_of_geartrain(comment: bytes) -> bool:
    """True if geartrain wrote an archive with this comment."""
    return _COMMENT.fullmatch(comment) is not None


def read(path: Path) -> dict[str, Any]:
    """Return a checkpoint's contents. Runs no code from the file; compares no checksums.

    Raises:
        TrainingError: it cannot be read, or is no checkpoint.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise TrainingError(f"{path} could not be read: {error.strerror}") from error
    except Exception as error:  # torch's own message advises to run code from the file
        raise TrainingError(
            f"{path} could not be read as a checkpoint ({type(error).__name__}): it is damaged, of "
            f"another kind, or holds more than tensors and plain values. Fix: geartrain ckpt "
            f"verify {path} names the damaged part"
        ) from error
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise TrainingError(f"{path} is no checkpoint of geartrain: it has no 'model'.")
    return state


def mapping(value: Any) -> Mapping[str, Any]:
    """Return a mapping of the file; an empty one if the file has another value there."""
    return value if isinstance(value, dict) else {}


def sequence(value: Any) -> list[Any]:
    """Return a list of the file; an empty one if the file has another value there."""
    return list(value) if isinstance(value, list | tuple) else []


def plan_of(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the plan in a checkpoint; empty if it has none."""
    with suppress(ValueError, RecursionError):
        return mapping(json.loads(str(state.get("plan", "{}"))))
    return {}


def ranks_of(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the state of each rank."""
    return [mapping(rank) for rank in sequence(mapping(state.get("fit")).get("ranks"))]


def trackers_in(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the states of ModelCheckpoints in a checkpoint."""
    parts = [mapping(mapping(state.get("fit")).get("parts"))]
    parts += [mapping(rank.get("parts")) for rank in ranks_of(state)]
    values = (value for part in parts for value in part.values())
    return [value for value in values if isinstance(value, dict) and value.keys() >= _KEYS]


def ends_with(path: Path, name: Any) -> bool:
    """True if a ModelCheckpoint's file name can mean this path."""
    return isinstance(name, str) and name != "" and path.as_posix().endswith(f"/{name}")


def leaves(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each item in nested dicts and lists; empty ones are items.

    Raises:
        TrainingError: they are nested too deeply, as a value that contains itself.
    """
    if depth > _DEPTH:
        raise TrainingError(f"{name[:60]}...: the values are nested deeper than {_DEPTH} levels")
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    if not items:
        yield name, value
    for key, item in items:
        yield from leaves(item, f"{name}.{key}" if name else str(key), depth + 1)


def tensors_of(value: Any) -> dict[str, torch.Tensor]:
    """Return the tensors in nested dicts and lists, by name."""
    return {name: item for name, item in leaves(value) if isinstance(item, torch.Tensor)}


def label_of(path: Path, folder: Path) -> str:
    """Return a file's name in a folder, with the target of a link."""
    name = str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)
    return f"{name} -> {os.readlink(path)}" if path.is_symlink() else name
