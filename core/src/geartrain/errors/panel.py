"""Show a usage error as a panel: what happened, the user's line, the fix; no traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

from geartrain.errors import UsageError, printable

#: The environment variable for the whole traceback; on the command line it is ``--traceback``.
TRACEBACK = "GEARTRAIN_TRACEBACK"

_previous = sys.excepthook


def excepthook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print the panel of an uncaught usage error; let Python print every other error."""
    if isinstance(error, UsageError):
        print(in_script(error), file=sys.stderr)
    else:
        _previous(kind, error, trace)


def in_script(error: UsageError) -> str:
    """Return the text for a script or a notebook: the panel, or the traceback on request."""
    if os.environ.get(TRACEBACK):
        return traceback_text(error)
    return panel(error, "geartrain", f"{TRACEBACK}=1")


def show_in_notebooks() -> None:
    """Let IPython show the panel too: it calls an error's ``_render_traceback_``."""

    def lines(error: UsageError) -> list[str]:
        return in_script(error).split("\n")

    UsageError._render_traceback_ = lines  # type: ignore[attr-defined]


def traceback_text(error: BaseException) -> str:
    """Return Python's own text."""
    import traceback

    return "".join(traceback.format_exception(error)).rstrip()


def panel(error: BaseException, who: str, more: str) -> str:
    """Return the text of the panel.

    Args:
        who: the beginning of the message: the program, or the command.
        more: the option for the whole traceback.
    """
    what, fix, how = str(error).rpartition(" Fix: ")
    if "\n" in how:  # another rank's error, with its traceback
        what, fix, how = "", "", str(error)
    lines, notes = _own_lines(error), getattr(error, "__notes__", [])
    parts = [f"{who}: {what or how}", *notes, *(f"  {line}" for line in lines)]
    if fix:
        parts.append(f"Fix: {how}")
    if lines:
        parts.append(f"The whole traceback: {more}")
    return printable("\n".join(parts))


def _own_lines(error: BaseException) -> list[str]:
    """Return the user's innermost line of the error and of each of its causes, each line once."""
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

    frames = list(traceback.walk_tb(error.__traceback__))
    own = [(frame.f_code.co_filename, line) for frame, line in frames if _is_own(frame)]
    yield from own[-1:]


def _is_own(frame: FrameType) -> bool:
    """True if the frame is of the user: not of geartrain, Python or an installed package."""
    import sysconfig

    from geartrain.errors.known import DISTRIBUTIONS

    file, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
    if file.startswith("<frozen") or module.partition(".")[0].replace("_", "-") in DISTRIBUTIONS:
        return False
    folders = Path(file).parents
    # The depth of the folder that the package is in, which may be one of pip install --target.
    depth = module.count(".") + (Path(file).name == "__init__.py")
    installed = depth < len(folders) and any(folders[depth].glob("*.dist-info"))
    return not installed and not Path(file).is_relative_to(sysconfig.get_path("stdlib"))


def _shown(file: str, line: int) -> str:
    import linecache

    near = os.path.relpath(file) if Path(file).is_relative_to(Path.cwd()) else file
    return f"{near}:{line}: {linecache.getline(file, line).strip()}".rstrip(": ")
