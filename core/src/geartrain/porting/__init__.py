"""What ``geartrain port`` does: a file written for PyTorch Lightning, as source, to one for geartrain.

It needs libcst (``pip install "geartrain[port]"``), which changes source without touching the formatting and the comments of the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from geartrain.errors import UsageError


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
        UsageError: libcst is not installed, or the source is no Python.
    """
    try:
        import libcst as cst
    except ModuleNotFoundError as error:
        raise UsageError('libcst is not installed, which porting needs. Fix: pip install "geartrain[port]"') from error
    from geartrain.porting.rewrite import rewrite

    try:
        module = cst.parse_module(source)
    except cst.ParserSyntaxError as error:
        raise UsageError(f"{name}, line {error.raw_line}: this is no Python: {error.message}. Nothing was changed") from error
    return rewrite(module)
