"""``geartrain port FILE``: a script written for PyTorch Lightning, as one for geartrain; a diff, unless it is told to write."""

from __future__ import annotations

import argparse
import difflib
import shutil
import sys
from pathlib import Path

from geartrain import GeartrainError, TrainingError, UsageError
from geartrain.plugin_api import replacing, user_path
from geartrain_port import PortResult, port


def command(name: str, argv: list[str]) -> None:
    """Print the diff, or write the files; then list what means something else now, and what is left to do by hand.

    Raises:
        UsageError: no such file, no Python, or nowhere to write.
        GeartrainError: something is left to do by hand.
    """
    parser = argparse.ArgumentParser(
        prog=f"geartrain {name}", allow_abbrev=False, description=__doc__, exit_on_error=False
    )
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="*",
        type=Path,
        help="a Python file; several are ported one by one",
    )
    parser.add_argument(
        "--write", action="store_true", help="change the files, instead of printing a diff"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write the ported file there")
    try:
        given, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UsageError(str(error)) from error
    if unknown:
        raise UsageError(f"there is no option {unknown[0]}. Known: --write, -o FILE")
    if not given.files:
        raise UsageError(f"which file? Fix: geartrain {name} train.py")
    if given.output is not None and (given.write or len(given.files) > 1):
        raise UsageError(
            "-o writes one file to one place. Fix: without --write, one FILE at a time"
        )
    output = None if given.output is None else user_path(given.output, "-o")
    sources = {path: _read(path) for path in given.files}
    ported = {
        path: port(source, str(path)) for path, source in sources.items()
    }  # all of them, before one is written
    for path, result in ported.items():
        if given.write or output is not None:
            _write(output or path, sources[path], result.text)
        else:
            sys.stdout.write(_diff(path, sources[path], result.text))
    _say(name, ported)


def _read(path: Path) -> str:
    if (
        path.suffix == ".ipynb"
    ):  # its JSON is an expression in Python, in which nothing would be found
        raise UsageError(
            f"{path} is a notebook. Fix: jupyter nbconvert --to script {path}, and port what it writes"
        )
    try:
        # newline="": the file keeps its line ends.
        with path.open(encoding="utf-8", newline="") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} cannot be read: {error}. Fix: the path of a Python file"
        ) from error


def _write(path: Path, before: str, text: str) -> None:
    if text == before and path.exists():
        return
    if path.exists() and not path.is_file():
        raise UsageError(
            f"{path} is not a file, and would be replaced by one. Fix: without -o the diff goes to standard output"
        )
    path = path.resolve()  # a link stays one
    if not path.parent.is_dir():
        raise UsageError(
            f"{path} cannot be written: there is no folder {path.parent}. Fix: create it"
        )
    try:
        with replacing(path) as file:  # a full disk leaves the user's file as it was
            file.write(text.encode())
            if path.exists():
                shutil.copymode(path, file.name)
    except TrainingError as error:
        raise UsageError(str(error)) from error


def _diff(path: Path, before: str, after: str) -> str:
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{path}", f"b/{path}"
    )
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def _say(name: str, ported: dict[Path, PortResult]) -> None:
    """List what means something else now and what is left, on standard error: the diff may go into a file.

    Raises:
        GeartrainError: something is left.
    """
    for path, result in ported.items():
        for changed in result.changed:
            print(
                f"{path}:{changed.line}: changed: {changed.what}: {changed.instead}",
                file=sys.stderr,
            )
        for left in result.left:
            print(f"{path}:{left.line}: {left.what}. Write: {left.instead}", file=sys.stderr)
    count = sum(len(result.left) for result in ported.values())
    if count:
        raise GeartrainError(
            f"{count} thing{'s are' if count > 1 else ' is'} left to do by hand; the lines are those of the file before"
        )
