"""Port the source of a file from PyTorch Lightning to geartrain, as ``geartrain port`` does.

libcst changes source and keeps the formatting and the comments of the rest.
"""

from __future__ import annotations

from geartrain import UsageError
from geartrain_port._version import __version__
from geartrain_port.result import PortResult, Todo

__all__ = ["PortResult", "Todo", "__version__", "port"]


def port(source: str, name: str = "<source>") -> PortResult:
    """Port one file's source.

    Args:
        source: the text of the file.
        name: the file's name, for errors.

    Returns:
        The new text, with notes about lines that were not ported or changed their meaning.

    Raises:
        UsageError: the source is not valid Python.
    """
    import libcst as cst  # here, because hints for errors import this package without libcst

    from geartrain_port.rewrite import rewrite

    try:
        module = cst.parse_module(source)
    except cst.ParserSyntaxError as error:
        raise UsageError(
            f"{name}, line {error.raw_line}: invalid Python: {error.message}. Nothing was changed"
        ) from error
    return rewrite(module)
