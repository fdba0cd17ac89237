"""File names of checkpoints: ``{epoch}-{val_loss:.2f}`` -> ``epoch=3-val_loss=0.25.ckpt``."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from itertools import count
from pathlib import Path, PurePosixPath

from geartrain import TrainingError, UsageError
from geartrain.plugin_api import nearest

#: A name in braces, optionally with a format after a colon.
_FIELD = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")
SUFFIX = ".ckpt"
#: Files that ``async_checkpoint`` writes in this process, and that may not exist yet.
UNWRITTEN: set[Path] = set()
#: The beginning of a URL. A Windows drive has one letter.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def check_pattern(pattern: str) -> str:
    """Return the pattern without its suffix.

    Raises:
        UsageError: it is empty, its braces do not match, or a format does not fit a number.
    """
    pattern = pattern.removesuffix(SUFFIX)
    remaining = _FIELD.sub("", pattern)
    if not pattern or pattern.endswith("/") or "{" in remaining or "}" in remaining:
        raise UsageError(
            f"model_checkpoint: filename={pattern!r} is not a name. "
            "Fix: write it as '{epoch}-{val_loss:.2f}'"
        )
    if not is_inside(pattern) or pattern.startswith("~") or _URL.match(pattern):
        raise UsageError(
            f"model_checkpoint: filename={pattern!r} leads out of the folder. Fix: dirpath"
        )
    for name, spec in _FIELD.findall(pattern):
        try:
            format(1 if name in ("epoch", "step") else 1.0, spec)
        except ValueError as error:
            raise UsageError(
                f"model_checkpoint: filename={pattern!r}: {{{name}:{spec}}} cannot be written: "
                f"{error}"
            ) from error
    return pattern


def fields(pattern: str) -> list[str]:
    """Return the metrics that a pattern names."""
    return [name for name, _ in _FIELD.findall(pattern) if name not in ("epoch", "step")]


def fill(pattern: str, values: Mapping[str, float], insert: bool) -> str:
    """Return the pattern filled with values.

    Args:
        values: ``epoch``, ``step`` and the metrics.
        insert: put ``NAME=`` before each value; ``/`` in a metric's name becomes ``_``, because
            it would start a folder.

    Raises:
        TrainingError: a metric that was not logged.
    """

    def one(match: re.Match[str]) -> str:
        name, spec = match[1], match[2] or ""
        if name not in values:
            raise TrainingError(
                f"geartrain-callbacks[model_checkpoint]: filename={pattern!r} has {name!r}, "
                f"which was not logged. {nearest(name, values)} "
                "Fix: log it with self.log, or take it out"
            )
        text = format(values[name], spec)
        return f"{name.replace('/', '_')}={text}" if insert else text

    return _FIELD.sub(one, pattern)


def free(folder: Path, name: str, own: str, listed: Collection[str] = ()) -> str:
    """Return the file name for ``name``, with ``-v1`` etc. if another file has that name.

    Args:
        own: a file that may be replaced.
        listed: files whose names are taken, also if they do not exist.

    Raises:
        TrainingError: a value in the name leads out of the folder.
    """
    if not is_inside(name):
        raise TrainingError(
            f"geartrain-callbacks[model_checkpoint]: the name {name!r} leads out of the folder. "
            "Fix: filename"
        )
    for version in count():
        file = PurePosixPath(f"{name}{f'-v{version}' if version else ''}{SUFFIX}").as_posix()
        path = folder / file
        if file == own or not (file in listed or path.exists() or path in UNWRITTEN):
            return file
    raise AssertionError  # count() has no end


def is_inside(name: str) -> bool:
    """True if the name, joined to a folder, stays inside the folder; links are not resolved."""
    return bool(PurePosixPath(name).parts) and not any(
        part in ("/", "//", "..") for part in PurePosixPath(name).parts
    )
