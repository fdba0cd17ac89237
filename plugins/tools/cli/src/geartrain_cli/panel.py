"""Show an error as a panel: what happened, the user's line, the fix; no traceback."""

from __future__ import annotations

import linecache
import os
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

from geartrain import GeartrainError
from geartrain.plugin_api import is_of_user


def panel(error: BaseException, command: str, option: str) -> str:
    """Return the text of the panel.

    Args:
        command: the beginning of the message.
        option: the option for the whole traceback.
    """
    message, action = parts_of(error)
    if not isinstance(error, GeartrainError):
        message = f"{type(error).__name__}: {error}"
    lines, notes = user_lines(error), getattr(error, "__notes__", [])
    parts = [f"{command}: {message}", *notes, *(f"  {line}" for line in lines)]
    if action:
        parts.append(f"Fix: {action}")
    if lines:
        parts.append(f"The whole traceback: {option}")
    return _printable("\n".join(parts))


def parts_of(error: BaseException) -> tuple[str, str]:
    """Return an error's message, and its fix, which is empty if the text has none.

    They are no attributes of GeartrainError: to raise an error of a loader's worker again, torch
    calls a class that has an attribute ``message`` as ``GeartrainError(message=...)``.
    """
    if not isinstance(error, GeartrainError):
        return str(error), ""
    message, found, action = str(error).rpartition(" Fix: ")
    # With more lines it is another rank's error and its traceback.
    return (message, action) if found and "\n" not in action else (str(error), "")


def _printable(text: str) -> str:
    """Return ``text`` with control characters escaped, so that a terminal does not obey them."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: repr(found[0])[1:-1], text)


def user_lines(error: BaseException) -> list[str]:
    """Return the user's innermost line of the error and of each of its causes, each line once."""
    places: dict[tuple[str, int], None] = {}
    cause: BaseException | None = error
    seen: list[BaseException] = []
    while cause is not None and not any(cause is other for other in seen) and len(places) < 10:
        seen.append(cause)
        places.update(dict.fromkeys(_places(cause)))
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return [_shown(file, line) for file, line in places]


def _places(error: BaseException) -> Iterator[tuple[str, int]]:
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        yield error.filename, error.lineno
        return
    frames = list(traceback.walk_tb(error.__traceback__))
    yield from [(f.f_code.co_filename, line) for f, line in frames if is_of_user(f)][-1:]


def _shown(file: str, line: int) -> str:
    near = os.path.relpath(file) if Path(file).is_relative_to(Path.cwd()) else file
    return f"{near}:{line}: {linecache.getline(file, line).strip()}".rstrip(": ")
