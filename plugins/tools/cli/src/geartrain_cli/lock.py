"""``geartrain plugins lock`` and ``--locked``: pin the code of the installed plugins."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from importlib_metadata import distributions

from geartrain import Plan, Run, UsageError, hookimpl
from geartrain.plugin_api import replacing, user_path

#: The file, beside the program.
FILE = "geartrain.lock"
_LABEL = "geartrain-cli[locked]"


class Locked:
    """Refuse a run if the installed plugins are not those of a lock file; each rank checks it.

    The selected plugins are imported before. So this finds another version or an edited file. It
    does not keep hostile code from running: pip's ``--require-hashes`` does, at installation.

    Args:
        file: what ``geartrain plugins lock`` has written.

    Raises:
        UsageError: the file does not exist, or is no lock file.
    """

    def __init__(self, file: str = FILE) -> None:
        self.file = user_path(file, "locked.file").absolute()
        try:
            self._locked: dict[str, dict[str, str]]
            self._locked = dict(json.loads(self.file.read_bytes())["locked"])
        except FileNotFoundError:
            raise UsageError(f"there is no {file}. Fix: geartrain plugins lock {file}") from None
        except (OSError, ValueError, LookupError, TypeError) as error:
            message = f"{file} is no lock file ({type(error).__name__})"
            raise UsageError(f"{message}. Fix: geartrain plugins lock {file}") from error
        self._checked_by: int | None = None

    @hookimpl
    def check_plan(self, plan: Plan) -> None:
        self._check()

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        if self._checked_by != os.getpid():  # a rank that was spawned makes no plan
            self._check()

    def _check(self) -> None:
        found = list(differences(self._locked, installed()))
        if found:
            raise UsageError(
                f"{_LABEL}: the installed plugins are not those of {self.file}: {'; '.join(found)}."
                " Fix: install what it names, or accept the change: geartrain plugins lock "
                f"{self.file}"
            )
        self._checked_by = os.getpid()


def write(file: str) -> int:
    """Write the lock file of the installed plugins; return the number of distributions in it."""
    locked = installed()
    with replacing(user_path(file, "lock")) as out:
        out.write(f"{json.dumps({'locked': locked}, indent=2)}\n".encode())
    return len(locked)


def installed() -> dict[str, dict[str, str]]:
    """Return name -> version and SHA-256 of the code, of core, all plugins and torch.

    Torch has its version alone: reading it takes seconds. Nothing is imported.
    """
    found: dict[str, dict[str, str]] = {}
    for distribution in distributions():
        try:
            name, declared = distribution.metadata["Name"], distribution.entry_points
        except Exception:  # broken metadata: no plugin of it can be selected, and a warning says so
            continue
        points = [ep for ep in declared if ep.group.startswith("geartrain.")]
        if name in found or not (points or name == "torch" or name.startswith("geartrain-")):
            continue  # of one name the first on sys.path is imported
        found[name] = {"version": distribution.version}
        if name != "torch":
            packages = {ep.module.partition(".")[0] for ep in points} | {name.replace("-", "_")}
            found[name]["sha256"] = _sha256(packages)
    return dict(sorted(found.items()))


def _sha256(packages: set[str]) -> str:
    digest = hashlib.sha256()
    for package in sorted(packages):
        for name, path in _files(package):
            code = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{package}/{name} {code}\n".encode())
    return digest.hexdigest()


def _files(package: str) -> Iterator[tuple[str, Path]]:
    """Yield the files that ``import package`` may read, except compiled ones, by relative name."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return
    for folder in map(Path, spec.submodule_search_locations or ()):
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(folder).as_posix(), path
    if spec.submodule_search_locations is None and spec.origin is not None:
        yield "", Path(spec.origin)


def differences(
    locked: Mapping[str, Mapping[str, str]], found: Mapping[str, Mapping[str, str]]
) -> Iterator[str]:
    """Yield each difference between the lock file and the installation, as part of an error."""
    for name in sorted({*locked, *found}):
        before, current = locked.get(name), found.get(name)
        if before is None or current is None:
            yield f"{name} is not {'locked' if before is None else 'installed'}"
        elif before["version"] != current["version"]:
            yield f"{name} is {current['version']}, and not {before['version']}"
        elif before != current:
            yield f"{name} {current['version']} has other code"
