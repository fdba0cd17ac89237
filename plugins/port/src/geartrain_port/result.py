"""What porting a file gives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True, slots=True)
class Todo:
    """Something that was not ported."""

    #: Of the source that was given, from 1.
    line: int
    what: str
    #: What to write.
    instead: str


@dataclass(frozen=True, slots=True)
class PortResult:
    """A file after it was ported."""

    text: str
    left: tuple[Todo, ...]
    #: What was ported and means something else here; ``instead`` says what.
    changed: tuple[Todo, ...] = ()
