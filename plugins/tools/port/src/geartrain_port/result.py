"""The result of porting a file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True, slots=True)
class Todo:
    """A note about a line: something that was not ported, or that has a different meaning now."""

    #: The line in the original source, from 1.
    line: int
    what: str
    #: The text to write, or the new meaning.
    instead: str


@dataclass(frozen=True, slots=True)
class PortResult:
    """A ported file."""

    text: str
    #: Lines that were not ported.
    left: tuple[Todo, ...]
    #: Lines that were ported and mean something else in geartrain.
    changed: tuple[Todo, ...] = ()
