"""The folder of a run: ``--output runs/NAME-{n}``, which a ``fit`` without ``--output`` has.

``{n}`` is the number after the largest that exists.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

from jsonargparse import Namespace

from geartrain import Module, UsageError
from geartrain.plugin_api import ClusterEnvironment, detect, user_path

#: The place of the number in ``--output``.
_NUMBER = "{n}"
#: Attempts to make a folder. Each failure is a folder that another process made or removed.
_ATTEMPTS = 1000


class RunFolders:
    """Chooses the folder of one run.

    Rank 0, or the process that starts it, makes the folder, so that no other run has the same. The
    other ranks do not know its number; they get it from rank 0 when they have joined.
    """

    def __init__(self) -> None:
        #: True if the folder is numbered, so that rank 0 knows it.
        self.is_numbered = False
        #: Folders that were made, the innermost first.
        self._made: list[Path] = []

    def choose(self, command: str, values: Namespace, model: type[Module]) -> None:
        """Set ``values.output`` if it has a number, or if a ``fit`` has none.

        Raises:
            UsageError: it is not clear which run is to be resumed, or no folder can be made.
        """
        if values.fast_dev_run or values.get("no_output"):
            return
        given = None if values.output is None else str(values.output)
        if _NUMBER not in given if given is not None else command != "fit":
            return
        pattern = Pattern(given or f"runs/{run_name(model)}-{_NUMBER}")
        place, resume = detect(), values.get("resume")
        if values.num_nodes > 1 and (place is None or place.launcher == "geartrain"):
            # Nodes that start their ranks themselves have not joined when rank 0 chooses.
            if given is not None or resume is not None:
                raise UsageError("several nodes need one folder, without {n}. Fix: --output DIR")
            return
        path = None if resume is None else _resumed(resume, pattern)
        if path is None and resume not in (None, "auto"):
            return  # there is no such file, as the trainer will say
        if path is None and ClusterEnvironment.starts_rank_0(place, values.num_nodes):
            path = self._make(pattern)
        self.is_numbered, values.output = True, path or pattern.path("N")

    def _make(self, pattern: Pattern) -> Path:
        parents = [p for p in (pattern.parent, *pattern.parent.parents) if not p.exists()]
        path = pattern.make()
        self._made = [path, *parents]
        return path

    def close(self) -> None:
        """Remove what was made if it is empty: nothing was started."""
        for folder in self._made:
            with suppress(OSError):
                folder.rmdir()


def run_name(model: type[Module]) -> str:
    """Return the name of a module's runs: ``CharLM`` -> ``char_lm``."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", model.__name__)
    return words.lower().strip("_") or "run"


class Pattern:
    """The folders of several runs: a path whose last part has ``{n}``.

    Raises:
        UsageError: another part has it.
    """

    def __init__(self, given: str) -> None:
        whole = user_path(given, "--output")
        self.parent = whole.parent
        self._before, number, self._after = whole.name.partition(_NUMBER)
        if not number or _NUMBER in str(self.parent) + self._after:
            raise UsageError(f"--output {given}: {_NUMBER} must be once, in the last part")

    def path(self, number: int | str) -> Path:
        return self.parent / f"{self._before}{number}{self._after}"

    def existing(self) -> dict[int, Path]:
        """Return what exists, by number."""
        form = re.compile(f"{re.escape(self._before)}([1-9][0-9]*){re.escape(self._after)}")
        paths = list(self.parent.iterdir()) if self.parent.is_dir() else []
        matches = ((form.fullmatch(path.name), path) for path in paths)
        return {int(match[1]): path for match, path in matches if match}

    def make(self) -> Path:
        """Make the folder with the number after the largest.

        Raises:
            UsageError: it cannot be made.
        """
        failure: OSError = FileExistsError()
        for _ in range(_ATTEMPTS):
            path = self.path(max(self.existing(), default=0) + 1)
            try:
                self.parent.mkdir(parents=True, exist_ok=True)
                path.mkdir()
            except (FileExistsError, FileNotFoundError) as error:
                failure = error  # another process made it first, or removed its empty parent
                if self.parent.exists() and not self.parent.is_dir():
                    break
            except OSError as error:
                failure = error
                break
            else:
                return path
        raise UsageError(
            f"the run cannot be saved in {path}: {failure.strerror}. "
            "Fix: --output DIR, or fit with --no-output"
        )


def _resumed(given: str, pattern: Pattern) -> Path | None:
    """Return the folder of the run that ``--resume`` means: the newest, or that of the file.

    Returns:
        ``None`` if ``auto`` starts from scratch, or if the file does not exist.

    Raises:
        UsageError: there is no such run, or the newest has no checkpoint and an older one has.
    """
    if given not in ("last", "best", "auto"):
        file = user_path(given, "--resume")
        found = next((p for p in file.absolute().parents if (p / "plan.json").is_file()), None)
        if found is None and file.is_file():
            raise UsageError(
                f"--resume {given}: the file is in no folder of a run, where the run could be "
                "saved. Fix: --output DIR, or --no-output"
            )
        return None if found is None else _as_typed(found)
    runs = {number: path for number, path in pattern.existing().items() if _is_of_fit(path)}
    if not runs:
        if given == "auto":
            return None
        raise UsageError(
            f"--resume: there is no run {pattern.path('N')}. Fix: --output DIR of the run, or "
            "leave --resume out"
        )
    newest = runs.pop(max(runs))
    if given != "auto" and not _has_checkpoint(newest):
        older = [str(runs[number]) for number in sorted(runs) if _has_checkpoint(runs[number])]
        if older:
            raise UsageError(
                f"--resume: {newest}, the newest run, has no checkpoint. "
                f"Fix: --output {older[-1]}, or leave --resume out"
            )
    return newest


def _is_of_fit(folder: Path) -> bool:
    """True if the folder has the files of a ``fit``; also if that has not ended."""
    if not (folder / "plan.json").is_file():
        return False
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        return bool(summary["command"] == "fit")
    except (OSError, ValueError, LookupError, TypeError):
        return True


def _has_checkpoint(folder: Path) -> bool:
    return next(folder.rglob("*.ckpt"), None) is not None


def _as_typed(folder: Path) -> Path:
    """Return a folder below the working directory as a relative path, as users type it."""
    working = Path.cwd()
    return folder.relative_to(working) if folder.is_relative_to(working) else folder
