"""Run the code blocks of one page in order, as a reader does: ``python blocks.py PAGE FOLDER``.

- ``python``, ``toml`` or ``yaml`` whose first line is a comment with a file name: written there
- ``python``: runs in a namespace that the page's blocks share
- ``text`` right after ``python``: its expected output
- ``console``: lines that begin with ``$ `` run under ``bash -e``; the lines below are their output
- other ``toml``, ``yaml`` and ``json``: parsed
- other ``text``: ignored

In expected output ``...`` matches any text in a line, and a line ``...`` matches any lines. Runs of
spaces, and the lines of tables, count as one. ``<!-- not run: REASON -->`` above a block, or above
a ``$`` line in it, skips it.

This file uses only the standard library, because it also runs in the page's environment.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tomllib
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LANGUAGES = ("python", "console", "toml", "yaml", "json", "text", "")

_NOT_RUN = re.compile(r"^<!-- not run:(?P<reason>.*?)-->$", re.S)
_FILE = re.compile(r"^# (?P<name>[\w./-]+\.\w+)$")
#: Printed between the commands of a block, to separate their outputs.
_NEXT = "\x1e"


class Wrong(Exception):
    """A block does not behave as the page shows."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block."""

    page: str
    #: The line (from 1) of the block's first line.
    line: int
    language: str
    text: str
    #: Why the block is not run; empty if it is run.
    not_run: str | None
    #: True if only blank lines separate the block from the previous one.
    follows: bool

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str | None:
        """Return the name of the file that the block shows, if any."""
        first = _FILE.match(self.text.partition("\n")[0])
        return first["name"] if first and self.language in ("python", "toml", "yaml") else None


@dataclass(slots=True)
class Command:
    """A ``$ `` line of a console block and its expected output."""

    typed: str
    not_run: str | None
    prints: list[str] = field(default_factory=list)


# --- reading --------------------------------------------------------------------------------------


def read_blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    blocks: list[Block] = []
    between: list[str] = []
    lines = iter(enumerate(page.read_text(encoding="utf-8").splitlines(), start=1))
    for number, line in lines:
        fence = re.match(r"^(?P<indent> *)```(?P<language>\w*)\s*$", line)
        if not fence:
            between.append(line.strip())
            continue
        body = [
            text for _, text in itertools.takewhile(lambda item: item[1].strip() != "```", lines)
        ]
        said = [text for text in between if text]
        marker = _NOT_RUN.match(said[-1]) if said else None
        text = "\n".join(line.removeprefix(fence["indent"]) for line in body)
        reason = marker["reason"].strip() if marker else None
        blocks.append(
            Block(page.name, number + 1, fence["language"], text, reason, not said and bool(blocks))
        )
        between = []
    return blocks


def commands(block: Block) -> list[Command]:
    """Return the commands of a console block.

    Raises:
        Wrong: the block has no command, or a line above the first one.
    """
    found: list[Command] = []
    reason, goes_on = None, False
    for line in block.text.splitlines():
        if goes_on:
            found[-1].typed += "\n" + line.removeprefix("> ")
        elif marker := _NOT_RUN.match(line.strip()):
            reason = marker["reason"].strip()
            continue
        elif line.startswith("$ "):
            found.append(Command(line[2:], reason))
            reason = None
        elif found:
            found[-1].prints.append(line)
            continue
        else:
            raise Wrong(f"a console block begins with a line '$ COMMAND', not {line!r}")
        goes_on = line.endswith("\\")
    if not found:
        raise Wrong("a console block has a line '$ COMMAND'")
    return found


def not_run(block: Block) -> Iterator[tuple[str, str]]:
    """Return (place, reason) for the block if it is not run, or for each skipped command."""
    if block.not_run is not None:
        yield block.place, block.not_run
    elif block.language == "console":
        yield from (
            (f"{block.place}: {command.typed}", command.not_run)
            for command in commands(block)
            if command.not_run is not None
        )


# --- comparing ------------------------------------------------------------------------------------


def check_output(expected: list[str], printed: str) -> None:
    """Check that the lines of ``expected`` appear in the output, without a gap.

    Raises:
        Wrong: they do not.
    """
    wanted = [_plain(line) for line in expected if line.strip()]
    pattern = "".join(r"(?:.*\n)*?" if line == "..." else _line(line) for line in wanted)
    found = "".join(f"{_plain(line)}\n" for line in printed.splitlines() if line.strip())
    if not re.search("^" + pattern, found, re.M):
        raise Wrong(
            "the page shows this output:\n" + "\n".join(wanted) + "\nbut the output is:\n" + found
        )


def _line(line: str) -> str:
    return ".*".join(re.escape(part) for part in line.split("...")) + r"\n"


def _plain(line: str) -> str:
    """Return a line without the parts that depend on the width of a table's columns."""
    return re.sub(r"([─━═])\1+", r"\1", re.sub(r"\s+", " ", line)).strip()


# --- running --------------------------------------------------------------------------------------


def run_page(page: Path, folder: Path) -> None:
    """Run the blocks of a page in ``folder``, which becomes the working folder.

    Raises:
        Wrong: names the place of the first block that does not behave as the page shows.
    """
    os.chdir(folder)
    sys.path.insert(0, "")
    module = types.ModuleType("page")
    sys.modules["page"] = module
    printed: str | None = None
    for block in read_blocks(page):
        try:
            printed = _run(block, module, printed if block.follows else None)
        except Wrong as error:
            raise Wrong(f"{block.place}: {error}") from None


def _run(block: Block, module: types.ModuleType, printed: str | None) -> str | None:
    """Run one block; return its output if it is python."""
    if block.not_run is not None:
        return None
    if block.language not in LANGUAGES:
        raise Wrong(
            f"a block of {block.language!r} is not run. Fix: use one of "
            f"{', '.join(filter(None, LANGUAGES))}"
        )
    if block.file is not None:
        _write(block)
    elif block.language == "python":
        return _python(block, module)
    elif block.language == "console":
        _console(block)
    elif block.language == "text" and printed is not None:
        check_output(block.text.splitlines(), printed)
    elif block.language in _PARSERS:
        _parse(block)
    return None


def _write(block: Block) -> None:
    path = Path(str(block.file))
    if path.is_absolute() or ".." in path.parts:
        raise Wrong(f"{path} lies outside the page's folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.text + "\n", encoding="utf-8")


def _python(block: Block, module: types.ModuleType) -> str:
    output = io.StringIO()
    try:
        # Blank lines above the code, so that errors have the line number of the page.
        code = compile("\n" * (block.line - 1) + block.text, block.page, "exec")
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            exec(code, vars(module))
    except (Exception, SystemExit) as error:  # an exit would skip the rest of the page
        shown = "".join(traceback.format_exception(error))
        raise Wrong(f"{shown}{output.getvalue()}") from None
    return output.getvalue()


def _console(block: Block) -> None:
    typed = [command for command in commands(block) if command.not_run is None]
    script = "".join(f"printf '{_NEXT}'\n{command.typed}\n" for command in typed)
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    )
    outputs = done.stdout.split(_NEXT)[1:]
    if done.returncode:
        raise Wrong(
            f"$ {typed[len(outputs) - 1].typed}\nended with exit code {done.returncode}:\n"
            f"{outputs[-1]}"
        )
    for command, output in zip(typed, outputs, strict=True):
        try:
            check_output(command.prints, output)
        except Wrong as error:
            raise Wrong(f"$ {command.typed}\n{error}") from None


def _yaml(text: str) -> Any:
    import yaml

    return yaml.safe_load(text)


_PARSERS: dict[str, Callable[[str], Any]] = {
    "toml": tomllib.loads,
    "json": json.loads,
    "yaml": _yaml,
}


def _parse(block: Block) -> None:
    try:
        _PARSERS[block.language](block.text)
    except Exception as error:
        raise Wrong(f"this is no {block.language}: {error}") from None


def main() -> int:
    page, folder = map(Path, sys.argv[1:])
    try:
        run_page(page.resolve(), folder)
    except Wrong as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
