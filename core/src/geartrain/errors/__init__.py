"""The errors that geartrain raises. Each message has what happened, whose it is, and the fix."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class GeartrainError(Exception):
    """Base class of geartrain's own errors."""


class UsageError(GeartrainError, ValueError):
    """The arguments cannot work; nothing has been started. The command line exits with 2."""


class TrainingError(GeartrainError, RuntimeError):
    """The run failed in a way that geartrain can explain. The command line exits with 1."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a sentence for an error about an unknown name: the nearest known one, otherwise all.

    A metric of several loaders has names as ``val_loss/dataloader_idx_0``: ``name/...`` is nearest.
    """
    names = sorted(set(known))
    if under := [candidate for candidate in names if candidate.startswith(f"{name}/")]:
        return f"Did you mean {under[0]!r}?"
    match = get_close_matches(name.lower(), [n.lower() for n in names], n=1)
    if match:
        return f"Did you mean {next(n for n in names if n.lower() == match[0])!r}?"
    return f"Known: {', '.join(names)}." if names else "None is defined."
