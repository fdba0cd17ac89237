"""``geartrain report DIR [DIR ...]``: write one HTML page about one or several runs."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from geartrain import UsageError
from geartrain.plugin_api import nearest, replacing, user_path
from geartrain_cli.help import CommandParser
from geartrain_tools.report.page import GENERATOR, make_page
from geartrain_tools.report.run_files import MARKS, RunFiles, read_run

#: The most runs of a page: a reader cannot distinguish more colours and columns.
_MOST = 50
#: Folders below a wrong DIR in which a run is looked for, for the error.
_DEPTH = 3


def command(name: str, argv: list[str]) -> None:
    """Write the page, and print its path and the notes of unusual files.

    Raises:
        UsageError: a folder is not a run's, a file cannot be read, or the output is not ours.
        TrainingError: the page cannot be written.
    """
    parser = CommandParser(
        name,
        "write one HTML page about one or several runs",
        ("geartrain report runs", "geartrain report runs/1 runs/2 -o compared.html"),
    )
    parser.add_argument(
        "folders",
        metavar="DIR",
        nargs="*",
        help="the folder of a run (--output of fit), or a folder of such folders",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write the page there; default DIR/report.html, with several DIRs ./report.html",
    )
    try:
        given, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UsageError(str(error)) from error
    if unknown:
        raise UsageError(f"there is no option {unknown[0]}. Known: -o FILE")
    if not given.folders:
        raise UsageError(f"no folder is given. Fix: geartrain {name} DIR, with fit's --output DIR")
    folders = [user_path(folder, "DIR") for folder in given.folders]
    runs = list(dict.fromkeys(run.resolve() for folder in folders for run in _runs(folder)))
    if len(runs) > _MOST:
        raise UsageError(
            f"a report compares at most {_MOST} runs, not {len(runs)}. Fix: pass the folders of "
            "the runs to compare"
        )
    output = folders[0] / "report.html" if len(folders) == 1 else Path("report.html")
    if given.output is not None:
        output = user_path(given.output, "-o")
    _check_output(output)
    read = [_read(folder, name) for folder, name in zip(runs, _names(runs), strict=True)]
    # A lone surrogate, which JSON may contain, has no UTF-8.
    page = make_page(read).encode("utf-8", "replace")
    with replacing(output) as file:
        file.write(page)
    for run in read:
        for note in run.notes:
            print(f"{run.name}: {note}")
    count = "1 run" if len(read) == 1 else f"{len(read)} runs"
    print(f"report: {output} ({count}, {len(page) / 1e6:.1f} MB)")


def _runs(folder: Path) -> list[Path]:
    """Return a run's folder, or the folders of the runs in it.

    Raises:
        UsageError: it does not exist, is a file, or contains no run.
    """
    if not folder.exists():
        near = folder.parent
        siblings = [path.name for path in near.iterdir() if path.is_dir()] if near.is_dir() else []
        hint = nearest(folder.name, siblings)
        hint = f"{hint} " if hint.startswith("Did") else ""
        raise UsageError(
            f"{folder} does not exist. {hint}Fix: pass the folder that fit got as --output"
        )
    if not folder.is_dir():
        remedy = f"pass its folder, {folder.parent}"
        raise UsageError(f"{folder} is a file, not the folder of a run. Fix: {remedy}")
    try:
        if _is_run(folder):
            return [folder]
        runs = [path for path in folder.iterdir() if path.is_dir() and _is_run(path)]
        if runs:
            return sorted(runs, key=_natural)
        below = ("*/" * depth + MARKS[0] for depth in range(2, _DEPTH + 1))
        found = next((path for pattern in below for path in islice(folder.glob(pattern), 1)), None)
    except OSError as error:
        raise _unreadable(error) from error
    remedy = "pass the folder that fit got as --output"
    if found is not None:
        remedy = f"geartrain report {found.parent.parent}"
    raise UsageError(
        f"{folder} is not the folder of a run, and contains none: it has no {', no '.join(MARKS)}. "
        f"Fix: {remedy}"
    )


def _is_run(folder: Path) -> bool:
    return any((folder / mark).exists() for mark in MARKS)


def _natural(path: Path) -> list[tuple[int, str]]:
    """Return a key that sorts run-2 before run-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in _parts(path.name)]


def _parts(name: str) -> list[str]:
    return [part for part in re.split(r"([0-9]+)", name) if part]


def _names(runs: Sequence[Path]) -> list[str]:
    """Return the name of each run: as many folders of its path as no other run's path ends with."""
    names = []
    for run in runs:
        parts = run.parts[1:] or run.parts
        others = [other.parts for other in runs if other != run]
        length = 1
        while length < len(parts) and any(own[-length:] == parts[-length:] for own in others):
            length += 1
        names.append("/".join(parts[-length:]))
    return names


def _read(folder: Path, name: str) -> RunFiles:
    try:
        return read_run(folder, name)
    except OSError as error:
        raise _unreadable(error) from error


def _unreadable(error: OSError) -> UsageError:
    return UsageError(
        f"{error.filename} cannot be read: {error.strerror}. Fix: allow this user to read it, or "
        "leave this run out"
    )


def _check_output(output: Path) -> None:
    """Refuse to replace a file that is not a report.

    Raises:
        UsageError: it is a folder, or another file.
    """
    if output.is_dir():
        hint = f"-o {output / 'report.html'}"
        raise UsageError(f"-o {output} is a folder. Fix: {hint}")
    if output.exists():
        try:
            with output.open("rb") as file:
                is_report = GENERATOR.encode() in file.read(1000)
        except OSError as error:
            raise _unreadable(error) from error
        if not is_report:
            raise UsageError(
                f"{output} exists and is no page of geartrain report, so it is not replaced. "
                "Fix: use another file with -o FILE, or remove it"
            )
