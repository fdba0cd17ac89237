"""Print what a file contains: no control character of it reaches the terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from geartrain_cli.tables import Group, show, show_text

#: Longer values are cut.
_MOST = 200


def printable(text: Any) -> str:
    """Return a value as text, with each character escaped that a terminal may obey."""
    text = str(text)
    text = text if len(text) <= _MOST else f"{text[:_MOST]}..."
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def table(title: str, rows: Iterable[Sequence[Any]], columns: Sequence[str] = ()) -> Group:
    """Return a group of rows whose cells are safe to print."""
    safe = [tuple(printable(cell) for cell in row) for row in rows]
    return Group(printable(title), safe, columns)


def print_tables(verdict: str, groups: Iterable[Group]) -> None:
    """Print one line, then groups."""
    show_text(printable(verdict))
    groups = [group for group in groups if group.rows]
    if groups:
        print()
        show(groups)


def print_json(facts: Any) -> None:
    """Print facts as one JSON object; numbers that JSON lacks are texts."""
    text = json.dumps(_finite(facts), indent=2, allow_nan=False)
    print(text.replace("\x7f", "\\u007f"))  # the one control character that json leaves


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def size(count: int) -> str:
    """Return a number of bytes as people read it."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
