"""The files of a run's folder. A file may be missing: the run is young, failed, or was killed."""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from geartrain_tools.report.curves import Metrics, read_metrics

#: A folder with one of these is a run's.
MARKS = ("plan.json", "metrics.jsonl", "summary.json")
#: Bytes that are read at the beginning and at the end of a log.
_LOG = 2**18
_WARNING = re.compile(r"\b(\w*Warning: .+)")
#: Ranks whose logs are shown, and the lines of each.
_RANKS, _LINES = 8, 40


@dataclass(frozen=True, slots=True)
class Medium:
    """A line of media/index.jsonl, with its file."""

    kind: str
    name: str
    step: int
    #: As in the index, relative to the run's folder.
    file: str
    #: The file itself, which is inside the run's folder.
    path: Path


@dataclass(slots=True)
class RunFiles:
    """A run's folder, read."""

    folder: Path
    #: Unique on the page.
    name: str
    plan: dict[str, Any] = field(default_factory=dict)
    #: Empty if the run is in progress or was killed.
    summary: dict[str, Any] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)
    #: How the run was started: the last object of provenance.jsonl, which older runs do not have.
    start: dict[str, Any] = field(default_factory=dict)
    #: Number of times that it was started.
    starts: int = 0
    #: Steps, and the seconds of training at each, without the time between a stop and a resume.
    times: tuple[list[int], list[float]] = field(default_factory=lambda: ([], []))
    #: The newest profile.json.
    profile: dict[str, Any] = field(default_factory=dict)
    media: list[Medium] = field(default_factory=list)
    #: Warnings in the logs of the ranks, with their number.
    warnings: Counter[str] = field(default_factory=Counter)
    #: The ends of the logs of a run that is not done: name of the file -> its last lines.
    logs: dict[str, str] = field(default_factory=dict)
    #: Notes about these files, for the reader of the page.
    notes: list[str] = field(default_factory=list)


def read_run(folder: Path, name: str) -> RunFiles:
    """Read a run's folder.

    Raises:
        OSError: a file cannot be read. A file with wrong contents becomes a note.
    """
    run = RunFiles(folder, name)
    run.plan = _json(run, folder / "plan.json")
    run.summary = _json(run, folder / "summary.json")
    _read_provenance(run)
    profiles = sorted(folder.glob("profile*.json"), key=_number)
    if profiles:
        run.profile = _json(run, profiles[-1])
    if (folder / "metrics.jsonl").exists():
        run.metrics = read_metrics(folder / "metrics.jsonl")
        run.notes += run.metrics.notes
    _read_media(run)
    logs = sorted(folder.glob("logs/rank-*.log"), key=_number)
    ends = {log: _read_log(run, log) for log in logs}
    if run.summary.get("status") != "done":
        # The ranks that raised an error first; a rank that was killed could write none.
        logs.sort(key=lambda log: not log.with_suffix(".error.json").exists())
        run.logs = {f"logs/{log.name}": ends[log] for log in logs[:_RANKS] if ends[log]}
        if len(logs) > _RANKS:
            run.notes.append(f"The logs of {len(logs) - _RANKS} other ranks are in logs/.")
    return run


def _number(path: Path) -> tuple[int, str]:
    """Return a key that sorts rank-2 before rank-10, and profile.json before profile-2.json."""
    digits = re.findall(r"\d+", path.name)
    return (int(digits[-1]) if digits else 0), path.name


def _json(run: RunFiles, path: Path) -> dict[str, Any]:
    """Return the object in a file; nothing if the file does not exist or has other contents."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        run.notes.append(f"{path.name} is not a JSON object, and is left out.")
        return {}
    return found


def _read_provenance(run: RunFiles) -> None:
    """Read provenance.jsonl: an object for each start, then steps with seconds since that start."""
    path = run.folder / "provenance.jsonl"
    if not path.exists():
        return
    steps, seconds = run.times
    offset: float | None = 0.0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
            if isinstance(entry, dict):
                run.start, run.starts, offset = entry, run.starts + 1, None
                continue
            step, second = int(entry[0]), float(entry[1])
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
            continue  # the last line may not be complete
        if not (step >= 0 and 0 <= second < math.inf):
            continue
        if offset is None:  # the first step after a start: a resumed run repeats some
            at = bisect_left(steps, step)
            del steps[at:], seconds[at:]
            offset = seconds[-1] if seconds else 0.0
        if not steps or step > steps[-1]:
            steps.append(step)
            seconds.append(max(round(offset + second, 2), seconds[-1] if seconds else 0.0))


def _read_media(run: RunFiles) -> None:
    index = run.folder / "media" / "index.jsonl"
    if not index.exists():
        return
    home, wrong = run.folder.resolve(), 0
    for line in index.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            fields = json.loads(line)
            kind, name, file = (str(fields[key]) for key in ("kind", "name", "file"))
            path = (home / file).resolve()
            # The index is only text: it must not bring other files of this machine into the page.
            if home not in path.parents or not path.is_file():
                raise ValueError
            run.media.append(Medium(kind, name, int(fields["step"]), file, path))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            wrong += 1
    if wrong:
        lines = "1 line names" if wrong == 1 else f"{wrong} lines name"
        run.notes.append(f"media/index.jsonl: {lines} no file of this run, and are left out.")


def _read_log(run: RunFiles, path: Path) -> str:
    """Count the warnings in a rank's log; return its last lines."""
    size = path.stat().st_size
    with path.open("rb") as file:
        data = file.read(_LOG)
        if size > 2 * _LOG:
            file.seek(size - _LOG)
            run.notes.append(f"logs/{path.name} is long: its middle was not searched for warnings.")
        data += file.read(_LOG)
    lines = data.decode("utf-8", "replace").splitlines()
    run.warnings.update(match[1] for line in lines if (match := _WARNING.search(line)))
    return "\n".join(lines[-_LINES:])
