"""What ``geartrain port`` does: a file written for PyTorch Lightning, as source, to one for geartrain.

libcst changes source without touching the formatting and the comments of the rest.
"""

from __future__ import annotations

from geartrain import UsageError
from geartrain_port._version import __version__
from geartrain_port.result import PortResult, Todo

__all__ = ["PortResult", "Todo", "__version__", "port"]


def port(source: str, name: str = "<source>") -> PortResult:
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
        raise UsageError(
            f"{name}, line {error.raw_line}: this is no Python: {error.message}. Nothing was changed"
        ) from error
    return rewrite(module)
