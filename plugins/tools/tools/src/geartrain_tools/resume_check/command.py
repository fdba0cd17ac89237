"""``geartrain verify resume TARGET``: train, kill, resume, and compare every step bit for bit."""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from geartrain import TrainingError, UsageError
from geartrain.plugin_api import nearest
from geartrain_cli.help import CommandParser
from geartrain_cli.target import Target
from geartrain_tools.checkpoints.compare import compared
from geartrain_tools.checkpoints.text import print_json, printable
from geartrain_tools.resume_check import every_step

_EXAMPLES = ("geartrain verify resume train.py", "geartrain verify resume train.py --kills 10")
#: Lines of a failed run that an error shows.
_LINES = 15


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


def command(name: str, argv: list[str], target: Target | None = None) -> None:
    """Check that a run of a user's module, data and strategy survives kills bit for bit.

    Raises:
        TrainingError: a run failed, or ends otherwise than without a kill.
        UsageError: an argument is wrong, or the run has fewer than two steps.
    """
    if argv[:1] != ["resume"] and argv[:1] not in (["-h"], ["--help"]):
        given = "nothing to verify is named."
        if argv:
            given = f"there is no {argv[0]!r} to verify. {nearest(argv[0], ['resume'])}"
        raise UsageError(f"{given} Fix: geartrain {name} resume TARGET")
    summary = "train, kill, resume, and compare every step with a run without a kill"
    parser = CommandParser(f"{name} resume TARGET", summary, _EXAMPLES)
    parser.add_argument("--kills", type=int, default=3, help="kills, each in a new run; default 3")
    parser.add_argument(
        "--steps", type=int, default=20, help="steps of each run; default 20; 0: as many as fit has"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    try:
        options, arguments = parser.parse_known_args(argv[1:] or ["--help"])
    except argparse.ArgumentError as error:
        raise UsageError(f"{error}. Fix: geartrain {name} resume --help") from error
    if options.kills < 1 or options.steps < 0:
        given = f"--kills {options.kills} --steps {options.steps}"
        raise UsageError(f"{given}: not a number of runs and steps. Fix: use numbers above 0")
    for option in arguments:
        if option.partition("=")[0] in ("--output", "--resume", "--no-output", "--no_output"):
            message = f"{option} is verify's own: its runs are in temporary folders"
            raise UsageError(f"{message}. Fix: leave it out")
    # The program, without the command and its arguments.
    program = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    fit = [*program, "fit", *arguments, "--log-every-n-steps", "1"]
    fit += ["--plugin", every_step.__file__ + ":EveryStep"]
    fit += ["--max-steps", str(options.steps)] if options.steps else []
    with tempfile.TemporaryDirectory(prefix="geartrain-verify-") as folder:
        _check(fit, Path(folder), options)


def _check(fit: Sequence[str], folder: Path, options: argparse.Namespace) -> None:
    whole, again = folder / "whole", folder / "again"
    _run(fit, whole)
    _run(fit, again)
    last = len(_files(whole))
    if last < 2:
        raise UsageError(f"the run has {last} step. Fix: more data or epochs")
    facts: dict[str, Any] = {"steps": last, "equal": True, "kills": []}
    difference = first_difference(whole, again, 1)
    if difference is not None:
        cause = "no --seed, or a kernel without a deterministic form (--deterministic true)"
        text = Difference(difference.step, difference.names, cause).text()
        raise TrainingError(f"two runs without a kill are not equal: {text}")
    steps = random.Random(0).sample(range(1, last), min(options.kills, last - 1))
    for step in sorted(steps):
        resumed = folder / f"killed-{step}"
        _run(fit, resumed, kill_after=step)
        log = _run([*fit, "--resume", str(resumed / "steps" / f"{step}.ckpt")], resumed)
        difference = first_difference(whole, resumed, step + 1, log)
        row: dict[str, Any] = {"step": step, "equal": difference is None}
        if difference is not None:
            row |= {"first": difference.step, "names": difference.names, "cause": difference.cause}
            facts["equal"] = False
        facts["kills"].append(row)
        if not options.json:
            result = "equal in every bit" if difference is None else difference.text()
            print(f"killed after step {step} of {last}: {result}", flush=True)
    if options.json:
        print_json(facts)
    if not facts["equal"]:
        failed = [str(row["step"]) for row in facts["kills"] if not row["equal"]]
        message = f"a run that was killed after step {', '.join(failed)} ends otherwise"
        raise TrainingError(f"{message} than without a kill")


def _run(fit: Sequence[str], output: Path, kill_after: int = 0) -> str:
    """Run a fit in a new process; return what it printed.

    Raises:
        TrainingError: it failed, or the kill did not end it.
    """
    done = subprocess.run(
        [*fit, "--output", str(output)],
        env={**os.environ, every_step.KILL_AFTER: str(kill_after)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if (done.returncode != 0) is not bool(kill_after):
        lines = "\n".join(printable(line) for line in done.stdout.splitlines()[-_LINES:])
        ended = f"ended with exit code {done.returncode}"
        run = f"a run that was to be killed after step {kill_after}" if kill_after else "fit"
        raise TrainingError(f"{run} {ended}. Its last lines:\n{lines}")
    return done.stdout


def _files(output: Path) -> list[Path]:
    return sorted((output / "steps").glob("*.ckpt"), key=lambda path: int(path.stem))


def first_difference(whole: Path, other: Path, first: int, log: str = "") -> Difference | None:
    """Return the first difference of two runs' folders, from a step on; ``None`` if all is equal.

    Args:
        first: the first step to compare.
        log: what the other run printed; its warnings may name the cause.
    """
    for path in _files(whole):
        step = int(path.stem)
        if step < first:
            continue
        file = other / "steps" / path.name
        if not file.exists():
            return Difference(step, ["the number of steps"], "the data have another length")
        a, b = (torch.load(each, weights_only=True, mmap=True) for each in (path, file))
        found = compared(a, b)
        settings = [row["name"] for row in found["settings"] if not row["name"].startswith("plan")]
        names = [*(row["name"] for row in found["tensors"]), *settings]
        if names:
            lines = [line.partition("Warning: ")[2] for line in log.splitlines()]
            return Difference(step, names, _cause(names), [line for line in lines if line][:3])
    return None


def _cause(names: Sequence[str]) -> str:
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
