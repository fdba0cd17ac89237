"""The page: one HTML file that needs no network, in which all text of runs is escaped."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from geartrain_tools import __version__
from geartrain_tools.report.curves import DEVICE, Curve, at_step, reduced
from geartrain_tools.report.media import groups as media_groups
from geartrain_tools.report.run_files import RunFiles
from geartrain_tools.report.tables import differences, head, number, plan_of, profile

#: The beginning of each page, by which the command knows its own files.
GENERATOR = '<meta name="generator" content="geartrain report'
#: Points of all curves together, about 15 bytes each; and the most and the least of one curve.
_POINTS, _MOST, _LEAST = 120_000, 1_500, 60
_LR = re.compile(r"(^|[-_/])(lr|learning_rate)($|[-_/])")
_SPEED = re.compile(r"(_per_sec(ond)?|/mfu|(^|_)(time|seconds|ms))$")
_STAGES = {"train": 0, "validate": 1, "test": 2}
_UNITS = {
    "percent": "%",
    "mib": "MiB",
    "mib_per_s": "MiB/s",
    "celsius": "°C",
    "watt": "W",
    "mhz": "MHz",
    "per_sec": "per second",
    "seconds": "s",
    "ms": "ms",
}
#: Names of metrics of which a smaller, or a larger value is better.
_SMALLER = re.compile(
    r"loss|error|perplexity|(^|[-_/])(ppl|nll|bce|mse|mae|rmse|wer|cer|fid|bpc|bpb)($|[-_/])"
)
_LARGER = re.compile(
    r"acc|precision|recall|reward|return|score|dice|(^|[-_/])(f1|auc|auroc|map|iou|bleu|psnr|ssim"
    r"|r2|rouge\w*|top\d+)($|[-_/])"
)
_SECTIONS = ("Metrics", "Learning rate and speed", "Devices")


@dataclass(slots=True)
class Chart:
    """The curves of one metric, one for each run that has it."""

    name: str
    stage: str
    section: str
    unit: str
    #: Index of the run -> its curve.
    curves: dict[int, Curve]

    @property
    def is_drawn(self) -> bool:
        """True if a curve has two points or more."""
        return any(len(curve.steps) > 1 for curve in self.curves.values())


def make_page(runs: Sequence[RunFiles]) -> str:
    """Return the page about runs, in their order."""
    charts = _charts(runs)
    drawn = [chart for chart in charts if chart.is_drawn]
    data: dict[str, Any] = {
        "runs": [run.name for run in runs],
        "charts": _points(drawn),
        "axes": _axes(runs),
    }
    style = _asset("uPlot.min.css") + _asset("page.css")
    # The page is a copy of uPlot, so it contains uPlot's licence.
    licence = f"/*\n{_asset('uPlot-LICENSE')}*/\n"
    scripts = [licence + _asset("uPlot.iife.min.js"), _asset("page.js")]
    return _template().render(
        generator=Markup(f'{GENERATOR} {__version__}">'),
        policy=_policy(style, scripts),
        title=f"{runs[0].name}: report" if len(runs) == 1 else f"{len(runs)} runs: report",
        # Only the style, the scripts and the data are not escaped. JSON in a script must not
        # contain "<": it could end the script.
        style=Markup(style),
        scripts=[Markup(script) for script in scripts],
        data=Markup(json.dumps(data, allow_nan=False).replace("<", "\\u003c")),
        written=time.strftime("%Y-%m-%d %H:%M"),
        version=__version__,
        runs=[head(i, run) for i, run in enumerate(runs)],
        results=list(_results(charts, runs)),
        axes=list(data["axes"]),
        sections=[
            (
                name,
                [
                    (i, chart, _gaps(chart, runs))
                    for i, chart in enumerate(drawn)
                    if chart.section == name
                ],
            )
            for name in _SECTIONS
            if any(chart.section == name for chart in drawn)
        ],
        profile=profile(runs),
        media=media_groups(runs),
        differences=differences(runs),
        plans=[plan_of(run) for run in runs],
    )


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = number
    return environment.from_string(_asset("page.html.j2"))


def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _policy(style: str, scripts: Sequence[str]) -> str:
    """Return the Content-Security-Policy: only these inline parts, and images in the page."""

    def allowed(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {' '.join(map(allowed, scripts))}; "
        f"style-src {allowed(style)}; img-src data:; base-uri 'none'; form-action 'none'"
    )


# --- curves ---------------------------------------------------------------------------------------


def _charts(runs: Sequence[RunFiles]) -> list[Chart]:
    """Return the charts of all runs: training first, then in the order of appearance."""
    charts: dict[tuple[str, str], Chart] = {}
    for i, run in enumerate(runs):
        for (stage, name), curve in run.metrics.curves.items():
            chart = charts.get((stage, name))
            if chart is None:
                section, unit = _section(stage, name), _unit(name)
                chart = charts[stage, name] = Chart(name, stage, section, unit, {})
            chart.curves[i] = curve
    return sorted(charts.values(), key=lambda chart: _STAGES.get(chart.stage, len(_STAGES)))


def _section(stage: str, name: str) -> str:
    if stage == DEVICE:
        return "Devices"
    other = _LR.search(name) or _SPEED.search(name)
    return "Learning rate and speed" if other else "Metrics"


def _unit(name: str) -> str:
    return next((unit for end, unit in _UNITS.items() if name.endswith(f"_{end}")), "")


def _points(charts: Sequence[Chart]) -> list[dict[str, Any]]:
    """Return the data of the charts. The more curves, the fewer points of each."""
    curves = sum(len(chart.curves) for chart in charts)
    points = min(max(_POINTS // max(curves, 1), _LEAST), _MOST)
    return [
        {
            "name": chart.name,
            "unit": chart.unit,
            "series": [{"run": i, **reduced(curve, points)} for i, curve in chart.curves.items()],
        }
        for chart in charts
    ]


def _gaps(chart: Chart, runs: Sequence[RunFiles]) -> list[str]:
    """Return a sentence for each run whose curve has values that cannot be drawn."""
    found = []
    for i, curve in chart.curves.items():
        if steps := curve.not_finite:
            count = "1 value is" if len(steps) == 1 else f"{len(steps)} values are"
            where = f"at step {steps[0]}" if len(steps) == 1 else f"the first at step {steps[0]}"
            found.append(f"{runs[i].name}: {count} NaN or infinite, {where}")
    return found


def _epochs_of(run: RunFiles) -> tuple[list[int], list[float]]:
    ended = run.summary.get("epochs")
    return run.metrics.epoch_knots(ended if type(ended) is int else None)


def _axes(runs: Sequence[RunFiles]) -> dict[str, list[Any]]:
    """Return the x axes that all runs have: name -> steps and values of each run.

    The page begins with the first one.
    """
    epochs = [_epochs_of(run) for run in runs]
    times = [(steps, values) for steps, values in (run.times for run in runs)]
    axes: dict[str, list[Any]] = {}
    if all(len(steps) > 1 for steps, _ in times):
        axes["time"] = [_thinned(knots) for knots in times]
    axes["step"] = []
    if all(steps for steps, _ in epochs):
        several = max(values[-1] for _, values in epochs) >= 2
        found = {"epoch": [_thinned(knots) for knots in epochs]}
        axes = {**found, **axes} if several else {**axes, **found}
    return axes


def _thinned(knots: tuple[Sequence[int], Sequence[float]]) -> list[list[float]]:
    """Return at most about 400 knots, with the first and the last."""
    count = len(knots[0])
    chosen = sorted({*range(0, count, -(-count // 400)), count - 1})
    return [[round(part[i], 4) for i in chosen] for part in knots]


def _goal(name: str) -> str:
    """Return ``"min"`` or ``"max"`` if a smaller or a larger value is better; else nothing."""
    plain = name.lower()
    return "min" if _SMALLER.search(plain) else "max" if _LARGER.search(plain) else ""


def _results(charts: Sequence[Chart], runs: Sequence[RunFiles]) -> Iterator[dict[str, Any]]:
    """Yield for each metric its best value in each run and when, and its last value.

    If it is unknown which values are better, the least and the greatest take its place. Metrics
    of evaluations come first.
    """
    epochs = [_epochs_of(run) for run in runs]
    for chart in sorted(charts, key=lambda chart: chart.stage == "train"):
        if chart.section != "Metrics":
            continue
        goal = _goal(chart.name)
        cells: list[dict[str, Any] | None] = []
        for i in range(len(runs)):
            curve = chart.curves.get(i)
            if curve is None or not curve.values:
                cells.append(None)
                continue
            finite = curve.finite or [math.nan]
            cell: dict[str, Any] = {"last": curve.values[-1], "wins": False}
            cell |= {"min": min(finite), "max": max(finite)}
            if goal and curve.finite:
                step = curve.steps[list(curve.values).index(cell[goal])]
                epoch = None if chart.stage == "test" else at_step(epochs[i], step)
                cell |= {"best": cell[goal], "step": step, "epoch": epoch}
            cells.append(cell)
        best = [cell["best"] for cell in cells if cell and "best" in cell]
        if len(best) > 1:
            winner = min(best) if goal == "min" else max(best)
            for compared in cells:
                if compared and compared.get("best") == winner:
                    compared["wins"] = True
        yield {"name": chart.name, "stage": chart.stage, "goal": goal, "cells": cells}
