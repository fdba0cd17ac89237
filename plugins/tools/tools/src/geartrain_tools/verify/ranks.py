"""``geartrain verify ranks TARGET``: whether any number of processes gives equal bits."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geartrain import UsageError
from geartrain.plugin_api import Registry
from geartrain_cli.help import CommandParser
from geartrain_tools.verify import evidence
from geartrain_tools.verify.runs import (
    Check,
    Difference,
    Result,
    first_difference,
    read_lines,
    saved_steps,
    train,
)

_STRATEGY = "elastic"


def _add_options(parser: CommandParser) -> None:
    parser.add_argument(
        "--devices", metavar="LIST", default="1,2", help="numbers of processes; default 1,2"
    )
    parser.add_argument(
        "--strategy.virtual_ranks",
        "--strategy.virtual-ranks",
        metavar="N",
        dest="virtual_ranks",
        type=int,
        help="ranks of each run; default: the largest of --devices",
    )
    parser.add_argument(
        "--strategy", choices=[_STRATEGY], default=_STRATEGY, help="elastic, the default"
    )
    parser.add_argument("--accelerator", choices=["cpu"], default="cpu", help="cpu, the default")


def _arguments(options: argparse.Namespace) -> list[str]:
    given = options.devices
    try:
        options.devices = list(dict.fromkeys(int(each) for each in given.split(",")))
    except ValueError:
        options.devices = []
    if len(options.devices) < 2 or min(options.devices) < 1:
        message = f"--devices {given}: not a list of numbers of processes"
        raise UsageError(f"{message}. Fix: two or more different ones, such as --devices 1,2,4")
    most = max(options.devices)
    if options.virtual_ranks is None:
        options.virtual_ranks = most
    if options.virtual_ranks < most:
        raise UsageError(
            f"--strategy.virtual_ranks {options.virtual_ranks} are fewer than the {most} processes "
            f"of --devices {given}. Fix: --strategy.virtual_ranks {most}"
        )
    Registry().find("strategy", _STRATEGY)
    fit = ["--strategy", _STRATEGY, "--strategy.virtual_ranks", str(options.virtual_ranks)]
    return [*fit, "--accelerator", options.accelerator, "--plugin", f"{evidence.__file__}:Evidence"]


def _check(fit: Sequence[str], folder: Path, options: argparse.Namespace) -> Result:
    first, *others = options.devices
    whole = folder / f"{first}"
    train([*fit, "--devices", str(first)], whole)
    steps = len(saved_steps(whole))
    if not steps:
        raise UsageError("the run has no step. Fix: more data or epochs")
    if not options.json:
        print(f"on {_processes(first)}: {steps} steps of {options.virtual_ranks} ranks", flush=True)
    again: list[bool] = []

    def is_unrepeatable() -> bool:
        """Train on ``first`` processes again, but only once; True if that differs, too."""
        if not again:
            repeated = folder / "again"
            train([*fit, "--devices", str(first)], repeated)
            found = first_difference(whole, repeated, lambda step, names: "", metrics=True)
            again.append(found is not None)
        return again[0]

    rows: list[dict[str, Any]] = [{"devices": first, "equal": True}]
    for count in others:
        other = folder / str(count)
        log = train([*fit, "--devices", str(count)], other)

        def cause(step: int, names: list[str], count: int = count, other: Path = other) -> str:
            if is_unrepeatable():
                return (
                    f"two runs on {_processes(first)} differ, too: no --seed, the time, "
                    "os.getpid(), or a kernel without a deterministic form (--deterministic true)"
                )
            return cause_of(step, names, Trained(first, whole), Trained(count, other))

        difference = first_difference(whole, other, cause, log=log, metrics=True)
        rows.append({"devices": count, "equal": difference is None})
        rows[-1] |= difference.facts() if difference is not None else {}
        if not options.json:
            print(f"on {_processes(count)}: {_text(difference, first)}", flush=True)
    failed = ", ".join(str(row["devices"]) for row in rows if not row["equal"])
    message = f"a run on {failed} processes ends otherwise than on {first}"
    facts = {"steps": steps, "virtual_ranks": options.virtual_ranks, "equal": not failed}
    return Result({**facts, "runs": rows}, message if failed else "")


def _text(difference: Difference | None, first: int) -> str:
    return f"as on {first}, equal in every bit" if difference is None else difference.text()


def _processes(count: int) -> str:
    return f"{count} process" + "es" * (count > 1)


@dataclass(frozen=True, slots=True)
class Trained:
    """A run that is done."""

    processes: int
    output: Path

    def evidence(self, last: int) -> dict[tuple[str, int], dict[str, Any]]:
        """Return what :class:`evidence.Evidence` wrote up to a step, by rank and step."""
        files = sorted(self.output.glob("evidence/*.jsonl"))
        rows = ((path.stem, row) for path in files for row in read_lines(path))
        return {(rank, row["step"]): row for rank, row in rows if row["step"] <= last}


def cause_of(step: int, names: Sequence[str], first: Trained, second: Trained) -> str:
    """Return what makes the number of processes matter, most likely."""
    a, b = (each.evidence(step) for each in (first, second))
    pairs = [(*place, a[place], b[place]) for place in a if place in b]
    found = [*_settings(pairs, first, second), *_batches(pairs), *_shared(pairs)]
    if not found and any(name.endswith(".random") for name in names):
        found = ["a rank draws random numbers more or less often"]
    return "; ".join(found) or (
        "something of the process, as os.getpid() or os.environ, or a variable of a module "
        "that ranks of one process share"
    )


_Pair = tuple[str, int, dict[str, Any], dict[str, Any]]


def _settings(pairs: Sequence[_Pair], first: Trained, second: Trained) -> Iterator[str]:
    for rank, step, a, b in pairs:
        for name, value in a["settings"].items():
            if value != (other := b["settings"][name]):
                yield (
                    f"{name} in rank {rank} is {value} on {_processes(first.processes)} and "
                    f"{other} on {second.processes} (step {step}): set it equally on all ranks"
                )
                return


def _batches(pairs: Sequence[_Pair]) -> Iterator[str]:
    places = [(step, rank) for rank, step, a, b in pairs if a["batches"] != b["batches"]]
    if places:
        step, rank = min(places)
        yield (
            f"rank {rank} gets another batch in step {step}, so the dataset or its sampler depends "
            "on the process"
        )


def _shared(pairs: Sequence[_Pair]) -> Iterator[str]:
    names = list(dict.fromkeys(n for _, _, a, b in pairs for n in (*a["shared"], *b["shared"])))
    if names:
        verb = "change" if len(names) > 1 else "changes"
        yield (
            f"{', '.join(names[:3])} {verb} in training, and ranks of one process share class "
            "attributes and global variables (use attributes of self)"
        )


CHECK = Check(
    "train the ranks of elastic on several numbers of processes, and compare every step",
    (
        "geartrain verify ranks train.py --devices 1,2,4",
        "geartrain verify ranks train.py --devices 1,3 --strategy.virtual_ranks 8",
    ),
    _add_options,
    _arguments,
    _check,
)
