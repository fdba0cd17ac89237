"""The verdict: what a run's steps wait for, in words, from the shares that the table prints."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from geartrain_monitor.capture import Reason
from geartrain_monitor.profile.report import COLLATE, Report

#: The least share of a step that a sentence is about.
_LARGE = 0.15
#: The most lines of a step that are named.
_LINES = 3


def verdict(report: Report, workers: int | None, reasons: Iterable[Reason]) -> list[str]:
    """Return sentences about the parts that take long, the longest first.

    Args:
        report: of rank 0.
        workers: those of the training loader; ``None`` if it is no DataLoader.
        reasons: lines of a step that wait for the device.
    """
    total = report.total or 1.0
    shares = {name: ms / total for name, ms in report.parts.items()}
    advice = {
        "data": ("waits for data", _of_data(report, workers)),
        "reduction": ("waits for other ranks", "try accumulate_grad_batches, or a compressor"),
        "logging": (
            "writes logs",
            f"{_slowest(report, 'logging')}: try a larger log_every_n_steps",
        ),
        "checkpoints": (
            "writes checkpoints",
            f"{_slowest(report, 'checkpoints')}: try --plugin async_checkpoint, or write fewer",
        ),
        "callbacks": ("is in events of plugins and callbacks", _slowest(report, "callbacks")),
    }
    large = [
        (shares[part], f"{shares[part]:.0%} of a {report.unit} {does}; {hint}")
        for part, (does, hint) in advice.items()
        if shares[part] >= _LARGE
    ]
    sentences = [text for _, text in sorted(large, reverse=True)]
    if large and max(large)[0] == shares["data"]:
        sentences[0] = f"input-bound: {sentences[0]}"
    lines = list(dict.fromkeys(str(reason).partition("\n")[0] for reason in reasons))
    if lines:
        more = f" and {len(lines) - _LINES} more" if len(lines) > _LINES else ""
        places = "; ".join(lines[:_LINES]) + more
        sentences.append(f"on a GPU a step waits for the device, or cannot be in a graph: {places}")
    if not sentences:
        computes = sum(shares[part] for part in ("forward", "backward", "optimizer"))
        sentences = [f"compute-bound: {computes:.0%} of a {report.unit} is forward, backward and"]
        sentences[0] += " optimizer"
    return sentences


def _of_data(report: Report, workers: int | None) -> str:
    collates = next((h["ms_per_step"] for h in report.hooks if h["hook"] == COLLATE), 0.0)
    if collates > report.parts["data"] / 2:
        return f"{collates / report.parts['data']:.0%} of that is the collate_fn: make it cheaper"
    if workers == 0:
        return f"try num_workers={min(4, os.cpu_count() or 1)}"
    if workers:
        return (
            f"{workers} workers are too few, or the dataset is slow: try num_workers={2 * workers}"
        )
    return "the loader is no DataLoader: prepare its batches in another process"


def _slowest(report: Report, part: str) -> str:
    """Name the hookimpl that takes longest in a part."""
    hooks: list[dict[str, Any]] = [h for h in report.hooks if h["part"] == part]
    return f"{hooks[0]['plugin']} {hooks[0]['hook']} takes most of it" if hooks else "look at it"
