"""Installed distributions: their entry points, except of broken ones; imports of ours."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from importlib import import_module
from itertools import chain
from multiprocessing import parent_process
from types import ModuleType
from typing import Any

from importlib_metadata import EntryPoints, distributions

from geartrain.errors import UsageError, warn

#: The folders that this process has warned about.
_warned: set[str] = set()
#: The state of ``sys.path`` at the last scan of the metadata, and its result. A scan of a hundred
#: distributions takes 13 ms.
_scanned: tuple[Any, EntryPoints] | None = None


def entry_points(**wanted: str) -> EntryPoints:
    """Return the installed entry points, as ``importlib_metadata.entry_points`` does.

    The metadata is read again if a folder of ``sys.path`` has changed.
    """
    global _scanned
    state = [(path, _changed_at(path)) for path in sys.path]
    if _scanned is None or _scanned[0] != state:
        _scanned = (state, _scan())
    return _scanned[1].select(**wanted)


def _changed_at(path: str) -> int | None:
    try:
        return os.stat(path or ".").st_mtime_ns
    except OSError:
        return None


def _scan() -> EntryPoints:
    """Read all entry points. A broken distribution must not end every command: leave it out."""
    found: dict[str, EntryPoints] = {}
    for distribution in distributions():
        folder, declared = str(getattr(distribution, "_path", "")), None
        try:
            name = distribution._normalized_name  # of the folder: most have no other need of a file
            if name in found:  # the first on sys.path is the one that Python imports
                continue
            declared = distribution.entry_points
            if any(point.group.startswith("geartrain") for point in declared):
                metadata = distribution.metadata
                if not (metadata["Name"] and metadata["Version"]):
                    raise ValueError("it has no name or no version")
            found[name] = declared
        except Exception as error:  # each file may be missing, malformed or not UTF-8
            _warn(folder, error, fails_in_torch=declared is None)
    return EntryPoints(chain.from_iterable(found.values()))


def _warn(folder: str, error: Exception, fails_in_torch: bool) -> None:
    if folder in _warned or parent_process() is not None:  # the parent has warned
        return
    _warned.add(folder)
    reason = f"its metadata cannot be read ({type(error).__name__}: {error})"
    if fails_in_torch:
        # torch reads all entry points during its import, and would fail at the same file.
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
        reason += ", and torch loads no device backends of other distributions"
    hint = "install that distribution again, or remove the folder"
    warn(f"{folder} is skipped, because {reason}. Fix: {hint}")


def canonical(distribution: str) -> str:
    """Return a distribution's name in pip's spelling."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


class MissingDistributionError(ImportError, UsageError):
    """The user asks for something of a distribution of ours that is not installed."""


def import_from(package: str, wanted: str) -> ModuleType:
    """Import a package that another distribution of ours brings.

    Args:
        package: its name, or a module of it; the distribution has the package's, with dashes.
        wanted: the name that the user wrote, for the error.

    Raises:
        MissingDistributionError: it is not installed; the message ends in the ``pip install`` line.
    """
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package.partition(".")[0]:
            raise
    distribution = package.partition(".")[0].replace("_", "-")
    message = f"{wanted} is not installed. Fix: pip install {distribution}"
    raise MissingDistributionError(message, name=distribution)


def import_optional(package: str) -> ModuleType | None:
    """Import a package as :func:`import_from`; ``None`` if its distribution is not installed."""
    with suppress(ImportError):
        return import_from(package, "")
    return None
