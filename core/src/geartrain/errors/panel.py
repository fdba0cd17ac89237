"""Show a usage error as one panel: what happened, the user's own line, the fix. ``--traceback`` shows the rest."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

from geartrain.errors import UsageError, printable

#: The environment variable that asks a script for the whole traceback, as ``--traceback`` asks the command line.
TRACEBACK = "GEARTRAIN_TRACEBACK"

_previous = sys.excepthook


def excepthook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print the panel of a usage error that a script does not catch; Python prints every other error."""
    if isinstance(error, UsageError):
        print(in_script(error), file=sys.stderr)
    else:
        _previous(kind, error, trace)


def in_script(error: UsageError) -> str:
    """Return the text for a script or a notebook: the panel, or the whole traceback if the environment asks for it."""
    if os.environ.get(TRACEBACK):
        return traceback_text(error)
    return panel(error, "geartrain", f"{TRACEBACK}=1")


def show_in_notebooks() -> None:
    """Let IPython show the panel too: it asks an error for ``_render_traceback_``."""
    UsageError._render_traceback_ = lambda error: in_script(error).split("\n")  # type: ignore[attr-defined]


def traceback_text(error: BaseException) -> str:
    """Return Python's own text."""
    import traceback

    return "".join(traceback.format_exception(error)).rstrip()


def panel(error: BaseException, who: str, more: str) -> str:
    """Return the text of the panel.

    Args:
        who: the beginning of the message: the program, or the command.
        more: what asks for the whole traceback.
    """
    what, fix, how = str(error).rpartition(" Fix: ")
    if "\n" in how:  # another rank's error, with its traceback
        what, fix, how = "", "", str(error)
    lines = _own_lines(error)
    parts = [
        f"{who}: {what or how}",
        *getattr(error, "__notes__", []),
        *(f"  {line}" for line in lines),
    ]
    if fix:
        parts.append(f"Fix: {how}")
    if lines:
        parts.append(f"The whole traceback: {more}")
    return printable("\n".join(parts))


def _own_lines(error: BaseException) -> list[str]:
    """The user's innermost line of the error and of each of its causes, without those that are the same."""
    found: dict[tuple[str, int], None] = {}
    one: BaseException | None = error
    seen: list[BaseException] = []
    while one is not None and not any(one is other for other in seen) and len(found) < 10:
        seen.append(one)
        for file, line in _places(one):
            found[file, line] = None
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return [_shown(file, line) for file, line in found]


def _places(error: BaseException) -> Iterator[tuple[str, int]]:
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        yield error.filename, error.lineno
        return
    import traceback

    own = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if _is_own(frame)
    ]
    yield from own[-1:]


def _is_own(frame: FrameType) -> bool:
    """True if the frame is neither of geartrain and its distributions nor of an installed package."""
    import sysconfig

    from geartrain.errors.known import DISTRIBUTIONS

    file, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
    if file.startswith("<frozen") or module.partition(".")[0].replace("_", "-") in DISTRIBUTIONS:
        return False
    folders = Path(file).parents
    depth = module.count(".") + (
        Path(file).name == "__init__.py"
    )  # of the folder that the package stands in
    installed = depth < len(folders) and any(
        folders[depth].glob("*.dist-info")
    )  # also in a folder of pip install --target
    return not installed and not Path(file).is_relative_to(sysconfig.get_path("stdlib"))


def _shown(file: str, line: int) -> str:
    import linecache

    near = os.path.relpath(file) if Path(file).is_relative_to(Path.cwd()) else file
    return f"{near}:{line}: {linecache.getline(file, line).strip()}".rstrip(": ")
