"""Curves of metrics.jsonl, and their reduction to the points that a page can draw."""

from __future__ import annotations

import json
import math
import re
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: A line with such a name comes from device_stats: docs/device-stats.md and docs/cuda.md.
_DEVICE = re.compile(r"(node\d+_)?(process_rss_mib|memory_used_percent|load_1m|gpu\d+_\w+)")
#: json.loads without its checks of arguments, which take a fifth of its time.
_decode = json.JSONDecoder().raw_decode
#: The stage of such lines, which are logged while a run trains and while it validates.
DEVICE = "device"


@dataclass(slots=True)
class Curve:
    """Values of one metric in one stage. Steps never fall."""

    name: str
    #: ``"train"``, ``"validate"``, ``"test"``, or ``"device"``.
    stage: str
    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    @property
    def finite(self) -> Sequence[float]:
        """The values that are neither NaN nor infinite."""
        if math.isfinite(sum(self.values)):
            return self.values
        return [value for value in self.values if math.isfinite(value)]

    @property
    def not_finite(self) -> list[int]:
        """The steps at which the value is NaN or infinite."""
        if math.isfinite(sum(self.values)):
            return []
        pairs = zip(self.steps, self.values, strict=True)
        return [step for step, value in pairs if not math.isfinite(value)]


@dataclass(slots=True)
class Metrics:
    """The contents of a metrics.jsonl."""

    #: (stage, name) -> curve, in the order of appearance.
    curves: dict[tuple[str, str], Curve] = field(default_factory=dict)
    #: Notes about the file, for the reader of the page.
    notes: list[str] = field(default_factory=list)
    #: Epoch, from 0 -> the last step of it that is known.
    epochs: dict[int, int] = field(default_factory=dict)

    def epoch_knots(self, ended: int | None) -> tuple[list[int], list[float]]:
        """Return steps, and the epochs that were trained at each: 1.0 is the end of the first.

        Between them epochs grow evenly.

        Args:
            ended: epochs that have ended; ``None`` if unknown.
        """
        steps, values = [0], [0.0]
        for epoch, step in sorted(self.epochs.items()):
            if step <= steps[-1]:
                continue
            value, length = epoch + 1.0, step - steps[-1]
            if len(steps) > 2 and (ended is None or ended <= epoch) and epoch == max(self.epochs):
                # The last one may be incomplete: compare it with the epochs before it.
                before = (steps[-1] - steps[-2]) / (values[-1] - values[-2])
                value = min(value, values[-1] + length / before)
            steps.append(step)
            values.append(value)
        return (steps, values) if len(steps) > 1 else ([], [])


def read_metrics(path: Path) -> Metrics:
    """Read a metrics.jsonl, which a run may still be writing. Lines that are not valid are counted.

    If the steps of training go back, a resumed run continued the file from an earlier step, or the
    same Trainer fitted again. The newer values replace the older ones from that step on.

    Raises:
        OSError: the file cannot be read.
    """
    found = Metrics()
    #: (stage, names of a line) -> its curves. Most lines have the names of an earlier line.
    layouts: dict[tuple[str, ...], list[Curve]] = {}
    wrong: list[int] = []
    last, number, line = -1, 0, ""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                stage, step, epoch, fields = _parsed(line)
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                wrong.append(number)
                continue
            curves = layouts.get((stage, *fields))
            if curves is None:
                curves = layouts[stage, *fields] = _curves(found, stage, fields)
            if stage == "train":
                if step < last:
                    lost = _cut(found, step)
                    found.epochs = {e: end for e, end in found.epochs.items() if end < step}
                    message = (
                        f"metrics.jsonl: the steps go back from {last} to {step} in line {number}"
                    )
                    reason = "a resumed run, or a second fit"
                    found.notes.append(
                        f"{message} ({reason}). The page shows the newer values; "
                        f"{lost} older values are left out."
                    )
                last = step
            if stage != "test" and epoch is not None and step >= found.epochs.get(epoch, 0):
                found.epochs[epoch] = step
            for curve, value in zip(curves, fields.values(), strict=True):
                curve.steps.append(step)
                curve.values.append(value)
    if wrong and wrong[-1] == number and not line.endswith("\n"):
        wrong.pop()
        message = "metrics.jsonl: the last line is not complete"
        found.notes.append(f"{message}: the run is in progress, or was killed.")
    if wrong:
        lines = "1 line is" if len(wrong) == 1 else f"{len(wrong)} lines are"
        first = f"line {wrong[0]}"
        found.notes.append(f"metrics.jsonl: {lines} not valid and left out; the first is {first}.")
    for curve in found.curves.values():
        _sort(curve)
    return found


def _parsed(line: str) -> tuple[str, int, int | None, dict[str, float]]:
    """Return the stage, the step, the epoch if it is a number, and the metrics of a line.

    Raises:
        ValueError: it is no such line. So do TypeError, KeyError and OverflowError.
    """
    text = line.strip()
    fields: dict[str, Any]
    fields, end = _decode(text)
    if end < len(text):
        raise ValueError
    step, stage = fields.pop("step"), fields.pop("stage", "train")
    epoch = fields.pop("epoch", None)
    if not isinstance(stage, str) or not 0 <= step < 2**63:
        raise ValueError
    for name, value in fields.items():
        if type(value) is not float:  # an integer, or "nan", "inf" and "-inf"
            fields[name] = float(value)
    return stage, int(step), epoch if type(epoch) is int and epoch >= 0 else None, fields


def at_step(knots: tuple[Sequence[int], Sequence[float]], step: int) -> float | None:
    """Return the value at a step, between the knots; ``None`` without knots."""
    steps, values = knots
    if not steps:
        return None
    i = min(max(bisect_left(steps, step), 1), len(steps) - 1)
    if len(steps) == 1:
        return values[0]
    slope = (values[i] - values[i - 1]) / (steps[i] - steps[i - 1])
    return values[i - 1] + slope * (step - steps[i - 1])


def _curves(found: Metrics, stage: str, names: Sequence[str] | dict[str, float]) -> list[Curve]:
    if any(_DEVICE.fullmatch(name) for name in names):
        stage = DEVICE
    return [found.curves.setdefault((stage, name), Curve(name, stage)) for name in names]


def _cut(found: Metrics, step: int) -> int:
    """Remove the values of a fit from a step on; return their number."""
    lost = 0
    for curve in found.curves.values():
        if curve.stage != "test":
            at = bisect_left(curve.steps, step)
            lost += len(curve.steps) - at
            del curve.steps[at:], curve.values[at:]
    return lost


def _sort(curve: Curve) -> None:
    """Sort by step; of values with one step keep the last."""
    steps = curve.steps
    if all(map(int.__lt__, steps, steps[1:])):
        return
    newest = dict(zip(steps, curve.values, strict=True))
    curve.steps = array("q", sorted(newest))
    curve.values = array("d", (newest[step] for step in curve.steps))


def reduced(curve: Curve, points: int) -> dict[str, list[Any]]:
    """Return a curve with at most about ``points`` points.

    Returns:
        ``x`` and ``y``, of equal length; ``None`` in ``y`` is a gap, for values that are not
        finite. Of a longer curve each point is the mean of several values, and ``lo`` and ``hi``
        are their least and greatest: no peak is lost.
    """
    count = len(curve.steps)
    if count <= points:
        return {"x": list(curve.steps), "y": [_rounded(value) for value in curve.values]}
    parts: dict[str, list[Any]] = {"x": [], "y": [], "lo": [], "hi": []}
    buckets = max(points // 3, 1)  # each bucket has three values
    for i in range(buckets):
        begin, end = i * count // buckets, (i + 1) * count // buckets
        chunk: Sequence[float] = curve.values[begin:end]
        if not math.isfinite(sum(chunk)):
            chunk = [value for value in chunk if math.isfinite(value)]
        parts["x"].append(curve.steps[end - 1])
        parts["y"].append(_rounded(sum(chunk) / len(chunk)) if chunk else None)
        parts["lo"].append(_rounded(min(chunk)) if chunk else None)
        parts["hi"].append(_rounded(max(chunk)) if chunk else None)
    return parts


def _rounded(value: float) -> float | None:
    """Return a value with six digits; ``None`` if it is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
