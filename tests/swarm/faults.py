"""Faults that are known and not yet mended: the list shrinks.

test_swarm.py fails if the example of an entry no longer fails: then remove the entry.
"""

from collections.abc import Callable
from dataclasses import dataclass

from .program import Draw


@dataclass(frozen=True)
class Fault:
    """A fault: its cause, a draw that shows it, and the draws that may meet it."""

    cause: str
    example: str
    covers: Callable[[Draw], bool]


FAULTS: list[Fault] = []


def reason(draw: Draw) -> str:
    """Return the cause of a known fault that a draw may meet, or ``""``."""
    return next((fault.cause for fault in FAULTS if fault.covers(draw)), "")
