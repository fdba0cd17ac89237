"""``geartrain compare TARGET --strategies A,B``: short runs of a user's module, in turns."""

from __future__ import annotations

import json
import math
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from geartrain import UsageError
from geartrain.plugin_api import Registry
from geartrain_cli.tables import Group
from geartrain_tools.checkpoints.text import printable, size, table
from geartrain_tools.compare.measures import FOLDER, STARTED
from geartrain_tools.trials import run_apart

#: Losses are means over this share of the steps.
_SHARE = 0.2
#: Losses that are closer, relatively, are taken as equal.
_ALIKE = 0.02


@dataclass(frozen=True, slots=True)
class Choice:
    """A strategy with its options, as ``bagua:algorithm=bytegrad``."""

    text: str
    name: str
    options: tuple[tuple[str, str], ...]

    def arguments(self) -> list[str]:
        """Return the arguments of ``fit``."""
        given = [each for name, value in self.options for each in (f"--strategy.{name}", value)]
        return ["--strategy", self.name, *given]


def read_choices(text: str) -> list[Choice]:
    """Return the strategies of ``--strategies``.

    Raises:
        UsageError: one is not installed, is named twice, or an option has no value.
    """
    choices = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, *options = part.split(":")
        Registry().find("strategy", name)
        pairs = [option.partition("=") for option in options]
        for option, _, value in pairs:
            if not (option and value):
                message = f"--strategies {part}: the option {option!r} has no value"
                raise UsageError(f"{message}. Fix: {name}:OPTION=VALUE")
        choices.append(Choice(part, name, tuple((n, value) for n, _, value in pairs)))
    twice = next((c.text for c in choices if choices.count(c) > 1), None)
    if twice or len(choices) < 2:
        problem = f"names {twice} twice" if twice else f"{text!r} names fewer than two"
        raise UsageError(f"--strategies {problem}. Fix: --strategies ddp,fsdp")
    return choices


@dataclass(slots=True)
class Row:
    """What the runs of a strategy gave; ``error`` if one failed."""

    choice: Choice
    error: str = ""
    #: One for each round: seconds to the first step, samples per second after it, and bytes that
    #: the machine sent in a step.
    first: list[float] = field(default_factory=list)
    speed: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    #: Bytes of each rank.
    memory: list[int] = field(default_factory=list)
    #: Of the last round: the loss of each step, a mean over ranks, and seconds since the first.
    losses: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def loss_at(self, seconds: float) -> float:
        """Return the mean of the last losses until a time."""
        count = sum(each <= seconds for each in self.times)
        last = self.losses[max(0, count - max(1, round(_SHARE * len(self.losses)))) : count]
        return statistics.fmean(last) if last else math.nan

    def add(self, folder: Path) -> None:
        """Read the files of a run."""
        ranks = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))]
        times = ranks[0]["times"]
        if len(times) < 2:
            self.error = "its run has one step, and the first one is not timed. Fix: more data"
            return
        steps = len(times) - 1  # the first one has the set-up
        # Ranks of tensor_parallel see the same batches.
        samples = {rank["batches_of"]: rank["samples"] for rank in ranks}
        self.first.append(times[0])
        self.speed.append(sum(samples.values()) / len(times) * steps / (times[-1] - times[0]))
        self.memory += [rank["memory"] for rank in ranks if rank["memory"] is not None]
        self.sent += [sent / steps for sent in [ranks[0]["sent"]] if sent is not None]
        self.losses = [
            statistics.fmean(each) for each in zip(*(r["losses"] for r in ranks), strict=True)
        ]
        self.times = [each - times[0] for each in times]


def run(choice: Choice, fit: Sequence[str], output: Path) -> str:
    """Train in new processes; return why that failed, else nothing."""
    arguments = [*fit, *choice.arguments(), "--output", str(output)]
    if choice.name == "single":
        arguments += ["--devices", "1"]
    done = run_apart(arguments, STARTED, repr(time.time()))
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line]
    return printable((named or lines or [f"ended with exit code {done.returncode}"])[-1])


def compare_strategies(
    choices: Sequence[Choice], fit: Sequence[str], folder: Path, rounds: int
) -> list[Row]:
    """Run all strategies in turns, so that a drift of the machine's speed affects them equally."""
    rows = [Row(choice) for choice in choices]
    for number in range(1, rounds + 1):
        for row in rows:
            if row.error:
                continue
            name = re.sub(r"[^\w.=-]+", "_", row.choice.text)
            output = folder / f"{name}-{number}"
            row.error = run(row.choice, fit, output)
            if not row.error:
                row.add(output / FOLDER)
    return rows


def facts_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return what ``--json`` prints of each strategy; medians of the rounds."""
    done = [row for row in rows if not row.error]
    equal_time = min((row.times[-1] for row in done), default=0.0)
    return [
        {"strategy": row.choice.text, "error": row.error}
        if row.error
        else {
            "strategy": row.choice.text,
            "samples_per_second": statistics.median(row.speed),
            "slowest_and_fastest": [min(row.speed), max(row.speed)],
            "first_step": statistics.median(row.first),
            "memory": max(row.memory, default=None),
            "sent_per_step": statistics.median(row.sent) if row.sent else None,
            "loss": row.loss_at(math.inf),
            "loss_after_equal_time": row.loss_at(equal_time),
            "equal_time": equal_time,
        }
        for row in rows
    ]


def tables(facts: Sequence[dict[str, Any]]) -> list[Group]:
    """Return the table of the strategies, and that of the failures."""
    done = [fact for fact in facts if "error" not in fact]
    seconds = f"{done[0]['equal_time']:.1f} s" if done else ""
    columns = ("samples/s", "to step 1", "memory", "sent/step", "loss", f"loss at {seconds}")
    rows = [
        (
            fact["strategy"],
            f"{fact['samples_per_second']:,.0f}",
            f"{fact['first_step']:.1f} s",
            "-" if fact["memory"] is None else size(fact["memory"]),
            "-" if fact["sent_per_step"] is None else size(round(fact["sent_per_step"])),
            f"{fact['loss']:.4g}",
            f"{fact['loss_after_equal_time']:.4g}",
        )
        for fact in done
    ]
    failed = [(fact["strategy"], fact["error"]) for fact in facts if "error" in fact]
    return [table("strategy", rows, columns), table("failed", failed)]


def recommendation(facts: Sequence[dict[str, Any]]) -> str:
    """Return which strategy to take, with the evidence."""
    done = [fact for fact in facts if "error" not in fact]
    if not done:
        return "no strategy trained"
    ordered = sorted(done, key=lambda fact: -fact["samples_per_second"])
    best_loss = min((f["loss_after_equal_time"] for f in done), key=lambda x: (math.isnan(x), x))
    close = [
        fact
        for fact in ordered
        if math.isnan(best_loss)
        or fact["loss_after_equal_time"] <= best_loss + _ALIKE * abs(best_loss)
    ]
    best, others = close[0], [fact for fact in ordered if fact is not close[0]]
    lines = [f"take {best['strategy']}"]
    if others:
        other = others[0]
        times = best["samples_per_second"] / other["samples_per_second"]
        apart = not _overlap(best, other)
        speed = f"{times:.2f} times the samples/s of {other['strategy']}"
        lines.append(speed if apart else f"{speed}, which the rounds do not tell apart")
    if not math.isnan(best_loss):
        lines.append(
            f"after {best['equal_time']:.1f} s its loss is {best['loss_after_equal_time']:.4g}, "
            f"and the lowest is {best_loss:.4g}"
        )
    least = min(done, key=lambda fact: fact["memory"] or math.inf)
    if least is not best and least["memory"] and best["memory"]:
        share = least["memory"] / best["memory"]
        if share < 1 - 5 * _ALIKE:
            lines.append(f"{least['strategy']} needs {share:.2f} of its memory")
    return f"{'; '.join(lines)}."


def _overlap(first: dict[str, Any], second: dict[str, Any]) -> bool:
    (a, b), (c, d) = first["slowest_and_fastest"], second["slowest_and_fastest"]
    return bool(a <= d and c <= b) or a == b
