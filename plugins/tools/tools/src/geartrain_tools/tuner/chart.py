"""A curve drawn as text."""

from __future__ import annotations

import math
from collections.abc import Sequence


def chart(
    xs: Sequence[float],
    ys: Sequence[float],
    mark: float | None,
    logarithmic: bool,
    width: int,
    height: int,
) -> str:
    """Return the curve as ``height`` lines of text, plus two lines for the axis.

    Points far above all points before the minimum are drawn on the top line.

    Args:
        xs: in rising order; above 0 if the axis is logarithmic.
        ys: one for each x.
        mark: the x of a vertical line, or ``None``.
        logarithmic: draw ``xs`` on a logarithmic axis.
        width: columns, without the labels of the axis.
        height: lines of the curve.
    """
    if not xs:
        return "nothing to draw"
    place = math.log10 if logarithmic else float
    remaining, right, low = place(xs[0]), place(xs[-1]), min(ys)
    before = max(ys[: ys.index(low) + 1]) - low
    # Cut off the top: a loss that diverges would flatten the rest of the curve.
    high = min(max(ys), low + 2 * before) if before else max(ys)

    def column(x: float) -> int:
        return round((place(x) - remaining) / ((right - remaining) or 1) * (width - 1))

    def line(y: float) -> int:
        return round((high - y) / ((high - low) or 1) * (height - 1))

    cells = [[" "] * width for _ in range(height)]
    if mark is not None:
        for cell in cells:
            cell[column(mark)] = "|"
    for x, y in zip(xs, ys, strict=True):
        cells[line(min(y, high))][column(x)] = "*"
    labels = {0: f"{high:.4g}", height - 1: f"{low:.4g}"}
    rows = [f"{labels.get(i, ''):>10} {''.join(row)}".rstrip() for i, row in enumerate(cells)]
    first, last = f"{xs[0]:.3g}", f"{xs[-1]:.3g}"
    below = [" " * 11 + first + last.rjust(width - len(first))]
    if mark is not None:
        text = f"{mark:.3g}"
        below.append(
            " " * (11 + max(0, min(column(mark) - len(text) // 2, width - len(text)))) + text
        )
    return "\n".join([*rows, *below])
