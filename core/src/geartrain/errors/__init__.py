"""The errors that geartrain raises. Each message has what happened, whose it is, and the fix."""

from __future__ import annotations

import sys
import sysconfig
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from types import FrameType


class GeartrainError(Exception):
    """Base class of geartrain's own errors."""


class UsageError(GeartrainError, ValueError):
    """The arguments cannot work; nothing has been started. The command line exits with 2."""


class TrainingError(GeartrainError, RuntimeError):
    """The run failed in a way that geartrain can explain. The command line exits with 1."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a sentence for an error about an unknown name: the nearest known one, otherwise all.

    Nearest are ``name/...``, a metric of several loaders as ``val_loss/dataloader_idx_0``, and
    ``..._name``: ``epochs`` is ``max_epochs``.
    """
    names = sorted(set(known))
    if under := [n for n in names if n.startswith(f"{name}/") or n.endswith(f"_{name}")]:
        return f"Did you mean {under[0]!r}?"
    match = get_close_matches(name.lower(), [n.lower() for n in names], n=1)
    if match:
        return f"Did you mean {next(n for n in names if n.lower() == match[0])!r}?"
    return f"Known: {', '.join(names)}." if names else "None is defined."


def is_of_user(frame: FrameType) -> bool:
    """True if a frame is not of geartrain, its script, Python or an installed package."""
    file = Path(frame.f_code.co_filename)
    module = str(getattr(frame.f_globals.get("__spec__"), "name", frame.f_globals.get("__name__")))
    root = file.name if module == "__main__" else module.partition(".")[0]
    of_python = file.is_relative_to(sysconfig.get_path("stdlib"))
    if of_python or file.name.startswith("<frozen") or root.partition("_")[0] == "geartrain":
        return False
    # The depth of the folder that the package is in, which may be one of pip install --target.
    depth = module.count(".") + (file.name == "__init__.py")
    return depth >= len(file.parents) or not any(file.parents[depth].glob("*.dist-info"))


def warn(message: str) -> None:
    """Warn at the user's innermost line, or at none: a line of geartrain's would tell nothing."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_of_user(frame):
        frame = frame.f_back
    place = ("geartrain", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    once = (globals() if frame is None else frame.f_globals).setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, UserWarning, *place, registry=once)
