"""What ``geartrain port`` does: a file written for PyTorch Lightning, as source, to one for geartrain.

libcst changes source without touching the formatting and the comments of the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from geartrain import UsageError
from geartrain_port._version import __version__

__all__ = ["Left", "Ported", "__version__", "port"]


@dataclass(frozen=True, order=True, slots=True)
class Left:
    """Something that was not ported."""

    #: Of the source that was given, from 1.
    line: int
    what: str
    #: What to write.
    instead: str


@dataclass(frozen=True, slots=True)
class Ported:
    """A file after it was ported."""

    text: str
    left: tuple[Left, ...]
    #: What was ported and means something else here; ``instead`` says what.
    changed: tuple[Left, ...] = ()


def port(source: str, name: str = "<source>") -> Ported:
    """Port one file's source.

    Args:
        name: the file's, for errors.

    Raises:
        UsageError: the source is no Python.
    """
    import libcst as cst  # not above: the names of Lightning, for errors, need no libcst

    from geartrain_port.rewrite import rewrite

    try:
        module = cst.parse_module(source)
    except cst.ParserSyntaxError as error:
        raise UsageError(f"{name}, line {error.raw_line}: this is no Python: {error.message}. Nothing was changed") from error
    return rewrite(module)
