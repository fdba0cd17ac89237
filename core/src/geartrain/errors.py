"""The errors that geartrain raises on purpose. Each message says what, whose, and the fix."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class GeartrainError(Exception):
    """Base of every error that geartrain raises on purpose."""


class UsageError(GeartrainError, ValueError):
    """The run was asked for wrongly; nothing has been started. The command line exits with 2."""


class TrainingError(GeartrainError, RuntimeError):
    """The run failed in a way that geartrain can explain. The command line exits with 1."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence for an error about an unknown ``name``: the nearest known one, else the list of all."""
    names = sorted(set(known))
    match = get_close_matches(name.lower(), [n.lower() for n in names], n=1)
    if match:
        return f"Did you mean {next(n for n in names if n.lower() == match[0])!r}?"
    return f"Known: {', '.join(names)}." if names else "There is none."
