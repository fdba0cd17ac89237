"""Paths that users give."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from geartrain.errors import UsageError
from geartrain.errors.distributions import import_optional

#: The beginning of a URL, also in a ``Path`` (``s3:/bucket``). A Windows drive has one letter.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def user_path(given: Any, name: str, reads: bool = False) -> Path:
    """Return the path that a user gave, with ``~`` expanded.

    Args:
        name: the option, for errors: ``"output"``, ``"geartrain-callbacks[csv]: path"``.
        reads: True for a checkpoint to read: of a URL, geartrain-resilience makes a local copy.

    Raises:
        UsageError: a URL, the home folder of an unknown user, an empty string, or no path at all.
    """
    if not isinstance(given, str | Path) or not str(given):
        raise UsageError(f"{name}={given!r} is not a path. Fix: a file or folder of this machine")
    if _URL.match(str(given)):
        if reads and (remote := import_optional("geartrain_resilience.remote.copies")):
            return Path(remote.local_copy(given, name))
        raise UsageError(
            f"{name}={str(given)!r} is a URL, and geartrain reads and writes files only. Fix: use "
            "a path; geartrain-resilience reads such checkpoints, and --plugin remote uploads runs"
        )
    path = os.path.expanduser(given)
    if str(path).startswith("~"):
        raise UsageError(f"{name}={str(given)!r}: no such user. Fix: the whole path, or ./~...")
    return Path(path)
