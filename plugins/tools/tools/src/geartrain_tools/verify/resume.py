"""``geartrain verify resume TARGET``: whether a killed run ends as if nothing had happened."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from geartrain import TrainingError, UsageError
from geartrain_cli.help import CommandParser
from geartrain_tools.verify.runs import Check, Result, first_difference, saved_steps, train

_UNREPEATABLE = "no --seed, or a kernel without a deterministic form (--deterministic true)"


def _add_options(parser: CommandParser) -> None:
    parser.add_argument("--kills", type=int, default=3, help="kills, each in a new run; default 3")


def _arguments(options: argparse.Namespace) -> list[str]:
    if options.kills < 1:
        raise UsageError(f"--kills {options.kills}: not a number of runs. Fix: 1 or more")
    return []


def _check(fit: Sequence[str], folder: Path, options: argparse.Namespace) -> Result:
    whole, again = folder / "whole", folder / "again"
    train(fit, whole)
    train(fit, again)
    last = len(saved_steps(whole))
    if last < 2:
        raise UsageError(f"the run has {last} step. Fix: more data or epochs")
    difference = first_difference(whole, again, lambda step, names: _UNREPEATABLE)
    if difference is not None:
        raise TrainingError(f"two runs without a kill are not equal: {difference.text()}")
    rows = []
    for step in sorted(random.Random(0).sample(range(1, last), min(options.kills, last - 1))):
        resumed = folder / f"killed-{step}"
        train(fit, resumed, kill_after=step)
        log = train([*fit, "--resume", str(resumed / "steps" / f"{step}.ckpt")], resumed)
        difference = first_difference(whole, resumed, cause_of, step + 1, log)
        row: dict[str, Any] = {"step": step, "equal": difference is None}
        rows.append(row if difference is None else row | difference.facts())
        if not options.json:
            found = "equal in every bit" if difference is None else difference.text()
            print(f"killed after step {step} of {last}: {found}", flush=True)
    failed = ", ".join(str(row["step"]) for row in rows if not row["equal"])
    message = f"a run that was killed after step {failed} ends otherwise than without a kill"
    facts = {"steps": last, "equal": not failed, "kills": rows}
    return Result(facts, message if failed else "")


def cause_of(step: int, names: Sequence[str]) -> str:
    """Return what makes a resumed run differ in these names, most likely."""
    if any(name.endswith(".random") for name in names):
        return (
            "something draws random numbers in another order after a resume, as a dataset with a "
            "generator of its own, or a loader that cannot be replayed"
        )
    if all(name.startswith("ranks.") for name in names):
        return "a plugin or a metric whose state_dict() lacks something"
    return (
        "an attribute of the module outside state_dict() (use register_buffer or "
        "on_save_checkpoint), or a loader that gives other batches after a resume"
    )


CHECK = Check(
    "train, kill, resume, and compare every step with a run without a kill",
    ("geartrain verify resume train.py", "geartrain verify resume train.py --kills 10"),
    _add_options,
    _arguments,
    _check,
)
