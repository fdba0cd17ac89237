"""The style of every table that a command prints: groups of rows that wrap between words."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.text import Text

#: Columns before a row, between two cells, and before cells that stand below their row.
_INDENT, _GAP, _BELOW = 2, 2, 6
#: The last cell stands beside the others if it has this many columns or more.
_PROSE = 24
#: A longer first cell has a line of its own.
_FIRST = 40


class Group:
    """Rows below a title. The last cell of each row wraps; the others stay on one line.

    Args:
        columns: names of the columns after the first, which the title names.
    """

    def __init__(
        self, title: str, rows: Iterable[Sequence[str]] = (), columns: Sequence[str] = ()
    ) -> None:
        self.title, self.rows, self.columns = title, list(rows), columns


def show(groups: Iterable[Group]) -> None:
    """Print groups, as wide as the terminal; those without rows are left out."""
    # No markup: geartrain-cuda[cuda] is a name, not a style.
    console = Console(markup=False, highlight=False, emoji=False)
    for i, group in enumerate(group for group in groups if group.rows):
        header, *lines = table(group, console.width)
        title = Text(header, style="dim")
        title.stylize("not dim bold", 0, len(group.title))
        for line in ([Text("")] if i else []) + [title, *map(Text, lines)]:
            console.print(line, soft_wrap=True)


def show_text(text: str) -> None:
    """Print a paragraph, as wide as the terminal."""
    console = Console(markup=False, highlight=False, emoji=False)
    for line in wrapped(text, console.width):
        console.print(line, soft_wrap=True)


def wrapped(text: str, width: int) -> list[str]:
    """Return a text in lines of ``width``. No word is cut: a path or an address can be copied."""
    lines: list[str] = []
    for line in text.splitlines() or [""]:
        lines += textwrap.wrap(
            " ".join(line.split()),
            max(width, 1),
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return lines


def by_version(distributions: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return a row for each version, with the distributions that have it."""
    versions = dict.fromkeys(distributions.values())
    return [
        (version, ", ".join(name for name, has in distributions.items() if has == version))
        for version in versions
    ]


def table(group: Group, width: int, first: int = _FIRST) -> list[str]:
    """Return the lines of a group: the title, then the rows.

    Cells for which a line has no room stand below their row.

    Args:
        first: a first cell that is longer has a line of its own.
    """
    count = max(map(len, group.rows))
    rows = [[*(" ".join(cell.split()) for cell in row[:-1]), row[-1]] for row in group.rows]
    rows = [row + [""] * (count - len(row)) for row in rows]
    widths = [max(_longest(row[i]) for row in rows) for i in range(count)]
    for i, name in enumerate(group.columns[: count - 2], 1):
        widths[i] = max(widths[i], len(name))
    short = [len(row[0]) for row in rows if len(row[0]) <= min(width // 2, first)]
    widths[0] = max([*short, len(group.title) - _INDENT if count > 1 and group.columns else 0])
    starts = [_INDENT + sum(widths[:i]) + _GAP * i for i in range(count)]
    last = _last_beside(widths, starts, width)
    lines = [_header(group, starts[: last + 1])]
    for name, *cells in rows:
        if len(name) > widths[0]:
            lines += [" " * _INDENT + line for line in wrapped(name, width - _INDENT)]
            name = ""
        lines += _row([name, *cells], starts, last, width)
    return lines


def _longest(cell: str) -> int:
    return max(map(len, cell.splitlines()), default=0)


def _last_beside(widths: Sequence[int], starts: Sequence[int], width: int) -> int:
    """Return the last column that stands beside the first in a line of ``width``."""
    for i in range(1, len(widths)):
        needed = min(widths[i], _PROSE) if i == len(widths) - 1 else widths[i]
        if starts[i] + needed > width:
            return i - 1
    return len(widths) - 1


def _header(group: Group, starts: Sequence[int]) -> str:
    line = group.title
    for name, start in zip(group.columns, starts[1:], strict=False):
        line = f"{line.ljust(start)}{name}"
    return line


def _row(cells: Sequence[str], starts: Sequence[int], last: int, width: int) -> list[str]:
    beside, below = list(cells[: last + 1]), [cell for cell in cells[last + 1 :] if cell]
    prose = [""]
    if 0 < last == len(cells) - 1:
        text, room = beside.pop(), width - starts[last]
        if room < max(map(len, text.split()), default=0) <= width - _BELOW:
            below = [text]  # it has a word that is too long for its column
        else:
            prose = wrapped(text, room)
    line = ""
    for cell, start in zip(beside, starts, strict=False):
        line = f"{line.ljust(start)}{cell}"
    line = f"{line.ljust(starts[last])}{prose[0]}".rstrip()
    lines = [line, *(" " * starts[last] + text for text in prose[1:])]
    lines += [" " * _BELOW + text for cell in below for text in wrapped(cell, width - _BELOW)]
    return [line for line in lines if line]
