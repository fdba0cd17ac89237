"""Paths that users give."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from geartrain.errors import UsageError

#: The beginning of a URL, also in a ``Path`` (``s3:/bucket``). A Windows drive has one letter.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def user_path(given: Any, name: str) -> Path:
    """Return the path that a user gave, with ``~`` expanded.

    Args:
        name: the option, for errors: ``"output"``, ``"geartrain-callbacks[csv]: path"``.

    Raises:
        UsageError: a URL, the home folder of an unknown user, an empty string, or no path at all.
    """
    if not isinstance(given, str | Path) or not str(given):
        raise UsageError(
            f"{name}={given!r} is not a path. Fix: use a file or a folder on this machine"
        )
    if _URL.match(str(given)):
        raise UsageError(
            f"{name}={str(given)!r} is a URL, and geartrain reads and writes files only. "
            "Fix: use a path on this machine, and copy the files to or from the storage yourself"
        )
    path = os.path.expanduser(given)
    if str(path).startswith("~"):
        raise UsageError(
            f"{name}={str(given)!r}: there is no such user. "
            "Fix: write the whole path, or './~...' for a folder of that name"
        )
    return Path(path)
