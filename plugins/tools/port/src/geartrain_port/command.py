"""``geartrain port FILE``: rewrite a script for PyTorch Lightning; prints a diff by default."""

from __future__ import annotations

import argparse
import difflib
import shutil
import sys
from pathlib import Path

from geartrain import GeartrainError, TrainingError, UsageError
from geartrain.plugin_api import replacing, user_path
from geartrain_cli.help import CommandParser
from geartrain_port import PortResult, port


def command(name: str, argv: list[str]) -> None:
    """Print the diff, or write the files; then list changes of meaning and things left to do.

    Raises:
        UsageError: a file does not exist, is not Python, or cannot be written.
        GeartrainError: something is left to do by hand.
    """
    parser = CommandParser(
        name,
        "rewrite a script for PyTorch Lightning; prints a diff by default",
        (
            "geartrain port train.py",
            "geartrain port train.py -o ported.py",
        ),
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
        raise UsageError(f"no file is given. Fix: geartrain {name} train.py")
    if given.output is not None and (given.write or len(given.files) > 1):
        raise UsageError("-o writes one file. Fix: use it without --write, with one FILE at a time")
    output = None if given.output is None else user_path(given.output, "-o")
    sources = {path: _read(path) for path in given.files}
    # Port all files before writing one, so that an error changes nothing.
    ported = {path: port(source, str(path)) for path, source in sources.items()}
    for path, result in ported.items():
        if given.write or output is not None:
            _write(output or path, sources[path], result.text)
        else:
            sys.stdout.write(_diff(path, sources[path], result.text))
    _say(name, ported)


def _read(path: Path) -> str:
    # A notebook's JSON is also valid Python, in which port would find nothing.
    if path.suffix == ".ipynb":
        raise UsageError(
            f"{path} is a notebook. "
            f"Fix: run jupyter nbconvert --to script {path}, and port the new file"
        )
    try:
        # newline="" keeps the file's line ends.
        with path.open(encoding="utf-8", newline="") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} cannot be read: {error}. Fix: pass the path of a Python file"
        ) from error


def _write(path: Path, before: str, text: str) -> None:
    if text == before and path.exists():
        return
    if path.exists() and not path.is_file():
        raise UsageError(
            f"{path} exists and is not a regular file. "
            "Fix: use another path; without -o the diff goes to standard output"
        )
    path = path.resolve()  # a link stays a link
    if not path.parent.is_dir():
        raise UsageError(
            f"{path} cannot be written: the folder {path.parent} does not exist. Fix: create it"
        )
    try:
        with replacing(path) as file:  # atomic, so that a full disk does not damage the file
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
    """List changes of meaning and things left to do, on standard error, apart from the diff.

    Raises:
        GeartrainError: something is left to do by hand.
    """
    for path, result in ported.items():
        for changed in result.changed:
            print(
                f"{path}:{changed.line}: changed: {changed.what}: {changed.instead}",
                file=sys.stderr,
            )
        for remaining in result.left:
            print(
                f"{path}:{remaining.line}: {remaining.what}. Write: {remaining.instead}",
                file=sys.stderr,
            )
    count = sum(len(result.left) for result in ported.values())
    if count:
        raise GeartrainError(
            f"{count} thing{'s are' if count > 1 else ' is'} left to do by hand; "
            "line numbers are those of the original file"
        )
