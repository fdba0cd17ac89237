"""Logged images, histograms, texts and tables, as the page shows them."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Sequence
from typing import Any

from geartrain_tools.report.run_files import Medium, RunFiles

#: Steps of one object that are shown, and the bytes of all images in a page.
_STEPS, _BYTES = 8, 1_500_000
#: More steps of an image, for the slider, if these have at most this share of the bytes.
_MORE, _SHARE = 24, 1 / 6
_CHARACTERS, _ROWS = 2_000, 20
_PNG = b"\x89PNG\r\n\x1a\n"
#: A smaller image is magnified by a whole number, up to this width in pixels.
_WIDTH = 96


def groups(runs: Sequence[RunFiles]) -> list[dict[str, Any]]:
    """Return the objects of all runs by kind and name, with some steps of each run.

    Returns:
        ``name``, ``kind``, and ``rows``: one for each run, with ``items`` and the ``total`` number
        of steps. An item that cannot be shown has ``instead``, a sentence.
    """
    found: dict[tuple[str, str], dict[int, list[Medium]]] = {}
    for i, run in enumerate(runs):
        for medium in run.media:
            found.setdefault((medium.kind, medium.name), {}).setdefault(i, []).append(medium)
    shown: list[dict[str, Any]] = []
    remaining = _BYTES
    for (kind, name), by_run in found.items():
        rows = []
        for i, media in by_run.items():
            chosen = _spread(media, _MORE if _are_small(media) else _STEPS)
            items = [_item(medium, remaining / len(chosen)) for medium in chosen]
            remaining -= sum(len(item.get("src", "")) for item in items)
            rows.append({"run": i, "name": runs[i].name, "items": items, "total": len(media)})
        shown.append({"kind": kind, "name": name, "rows": rows})
    return shown


def _are_small(media: Sequence[Medium]) -> bool:
    """True if many of these are images that the page has room for."""
    if media[0].kind not in ("image", "figure"):
        return False
    size = sum(medium.path.stat().st_size for medium in _spread(media, _MORE))
    return size * 4 / 3 <= _BYTES * _SHARE


def _spread(media: Sequence[Medium], most: int) -> list[Medium]:
    """Return at most this many objects, evenly spread, with the first and the last."""
    if len(media) <= most:
        return list(media)
    return [media[round(i * (len(media) - 1) / (most - 1))] for i in range(most)]


def _item(medium: Medium, most: float) -> dict[str, Any]:
    item: dict[str, Any] = {"step": medium.step, "file": medium.file}
    try:
        return item | _contents(medium, most)
    except (OSError, ValueError, TypeError, KeyError, IndexError, RecursionError, struct.error):
        return item | {"instead": "cannot be shown: its file has other contents"}


def _contents(medium: Medium, most: float) -> dict[str, Any]:
    """Return the fields that the page shows; of an image only if it has at most ``most`` bytes.

    Raises:
        ValueError: its file has other contents. So do the other errors of parsing.
    """
    if medium.kind in ("image", "figure"):
        return _image(medium, most)
    if medium.kind == "text":
        text = medium.path.read_text(encoding="utf-8", errors="replace")
        return {"text": text[:_CHARACTERS] + ("…" if len(text) > _CHARACTERS else "")}
    if medium.kind not in ("histogram", "table"):
        return {"instead": f"is of an unknown kind, {medium.kind}"}
    fields = json.loads(medium.path.read_bytes())
    if medium.kind == "table":
        rows = [[str(cell) for cell in row] for row in fields["rows"]]
        columns = [str(column) for column in fields["columns"]]
        return {"columns": columns, "rows": rows[:_ROWS], "more": max(len(rows) - _ROWS, 0)}
    counts, edges = [float(n) for n in fields["counts"]], [float(x) for x in fields["edges"]]
    highest = max(counts) or 1.0
    # A bar has the width 1 and at most the height 40.
    bars = [(i, round(40 * n / highest, 2)) for i, n in enumerate(counts)]
    return {"bars": bars, "low": edges[0], "high": edges[-1]}


def _image(medium: Medium, most: float) -> dict[str, Any]:
    size = medium.path.stat().st_size
    if size * 4 / 3 > most:
        return {"instead": f"is too large for the page ({size / 1e6:.1f} MB)"}
    data = medium.path.read_bytes()
    if not data.startswith(_PNG):
        raise ValueError
    width, height = struct.unpack(">II", data[16:24])
    times = max(_WIDTH // max(width, 1), 1)
    source = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"src": source, "width": width * times, "height": height * times}
