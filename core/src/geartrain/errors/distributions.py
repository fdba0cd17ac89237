"""Installed distributions: their entry points, except of broken ones; imports of ours."""

from __future__ import annotations

import os
import re
import warnings
from importlib import import_module
from itertools import chain
from multiprocessing import parent_process
from types import ModuleType

from importlib_metadata import EntryPoints, distributions

from geartrain.errors import UsageError

#: The folders that this process has warned about.
_warned: set[str] = set()


def entry_points(**wanted: str) -> EntryPoints:
    """Return the installed entry points, as ``importlib_metadata.entry_points`` does.

    One broken distribution must not end every command: it is left out, with a warning.
    """
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
    return EntryPoints(chain.from_iterable(found.values())).select(**wanted)


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
    warnings.warn(f"{folder} is skipped, because {reason}. Fix: {hint}", stacklevel=3)


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
