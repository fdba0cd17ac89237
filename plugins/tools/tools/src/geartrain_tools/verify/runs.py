"""What every check of ``geartrain verify`` does: train in a new process, and compare two runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from geartrain import TrainingError, UsageError
from geartrain_cli.help import CommandParser
from geartrain_tools.checkpoints.compare import compared
from geartrain_tools.checkpoints.text import printable
from geartrain_tools.trials import run_apart
from geartrain_tools.verify.every_step import KILL_AFTER

#: Lines of a failed run that an error shows.
_LINES = 15


@dataclass(frozen=True, slots=True)
class Result:
    """What a check has found."""

    #: For ``--json``.
    facts: dict[str, Any]
    #: The error with which the command ends; nothing if all runs are equal.
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """One check of the command."""

    summary: str
    examples: Sequence[str]
    #: Adds the options that only this check has.
    add_options: Callable[[CommandParser], None]
    #: Returns arguments of ``fit``; raises UsageError for a wrong option.
    arguments: Callable[[argparse.Namespace], list[str]]
    #: Trains with the command line of a fit, in a folder; prints what it finds, without ``--json``.
    run: Callable[[Sequence[str], Path, argparse.Namespace], Result]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first step after which two runs differ."""

    step: int
    #: Names of tensors and values, those of tensors with the largest difference first.
    names: list[str]
    cause: str
    warnings: list[str] = field(default_factory=list)

    def text(self) -> str:
        more = f" and {len(self.names) - 3} more" if len(self.names) > 3 else ""
        lines = [
            f"differs from step {self.step} on, in {', '.join(self.names[:3])}{more}",
            f"  likely cause: {self.cause}",
            *(f"  the run warned: {warning}" for warning in self.warnings),
        ]
        return "\n".join(map(printable, lines))

    def facts(self) -> dict[str, Any]:
        return {"first": self.step, "names": self.names, "cause": self.cause}


def train(fit: Sequence[str], output: Path, kill_after: int = 0) -> str:
    """Run a fit in a new process; return what it printed.

    Raises:
        TrainingError: it failed, or the kill did not end it.
        UsageError: its command line is wrong.
    """
    done = run_apart([*fit, "--output", str(output)], KILL_AFTER, str(kill_after))
    if (done.returncode != 0) is not bool(kill_after):
        lines = "\n".join(printable(line) for line in done.stdout.splitlines()[-_LINES:])
        ended = f"ended with exit code {done.returncode}"
        run = f"a run that was to be killed after step {kill_after}" if kill_after else "fit"
        kind = UsageError if done.returncode == 2 else TrainingError
        raise kind(f"{run} {ended}. Its last lines:\n{lines}")
    return done.stdout


def saved_steps(output: Path) -> list[Path]:
    """Return the checkpoints of a run's steps, in order."""
    return sorted((output / "steps").glob("*.ckpt"), key=lambda path: int(path.stem))


def first_difference(
    whole: Path,
    other: Path,
    cause_of: Callable[[int, list[str]], str],
    first: int = 1,
    log: str = "",
    metrics: bool = False,
) -> Difference | None:
    """Return the first difference of two runs' folders, from a step on; ``None`` if all is equal.

    Args:
        cause_of: returns the likely cause of a difference in this step and these names.
        first: the first step to compare.
        log: what the other run printed; its warnings may name the cause.
        metrics: compare the lines of ``metrics.jsonl``, too.
    """
    logged = (metrics_by_step(whole), metrics_by_step(other)) if metrics else ({}, {})
    for path in saved_steps(whole):
        step = int(path.stem)
        if step < first:
            continue
        file = other / "steps" / path.name
        if not file.exists():
            return Difference(step, ["the number of steps"], "the data have another length")
        a, b = (torch.load(each, weights_only=True, mmap=True) for each in (path, file))
        found = compared(a, b)
        settings = [row["name"] for row in found["settings"] if not row["name"].startswith("plan")]
        lines = (each.get(step, []) for each in logged)
        names = [*(row["name"] for row in found["tensors"]), *unequal(*lines), *settings]
        if names:
            warned = [line.partition("Warning: ")[2] for line in log.splitlines()]
            cause = cause_of(step, names)
            return Difference(step, names, cause, [line for line in warned if line][:3])
    return None


def metrics_by_step(output: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the lines of a run's ``metrics.jsonl`` by step."""
    found: dict[int, list[dict[str, Any]]] = {}
    for row in read_lines(output / "metrics.jsonl"):
        found.setdefault(row["step"], []).append(row)
    return found


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file with one JSON object a line; nothing if there is no file."""
    if path.exists():
        yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())


def unequal(
    first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Yield the names of values that are not equal in the lines of one step."""
    a, b = (
        {(i, key): row[key] for i, row in enumerate(rows) for key in row}
        for rows in (first, second)
    )
    names = {key: None for place in {**a, **b} if a.get(place) != b.get(place) for key in place[1:]}
    yield from (f"metrics.{name}" for name in names)
