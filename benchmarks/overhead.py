"""Cost of a step on the CPU: the loop by hand, geartrain, and other trainers that are installed.

``mlp`` is 64-64-10 with batches of 32 samples; see trainers.py for the others. The batches are made
before, one thread computes, on one core. The trainers take turns of a few steps in this process
(see turns.py); CPU time counts, and the median ratio to the loop by hand in the same round. ``by
hand, again`` is the same loop once more: the run is void if its ratio is further from 1 than 0.02.
``equal`` says whether a trainer ends with the weights of the loop by hand, bit for bit.

    python benchmarks/overhead.py [--what mlp gpt] [--optimizer adam] [--rounds 60] [--steps 20]
                                  [--rows geartrain Lightning] [--bar] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import statistics
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from trainers import (
    ON_CPU,
    TRAINERS,
    Trainer,
    Watch,
    Work,
    adam,
    by_expert,
    by_geartrain,
    by_hand,
    by_lightning,
    sgd,
)
from turns import TRUSTED, alternate, pin, ratios

AGAIN = "by hand, again"
LOOPS: dict[str, Trainer] = {
    **TRAINERS,
    AGAIN: by_hand,
    "by an expert": by_expert,
    "geartrain, one log": partial(by_geartrain, log=True),
    "geartrain, fast": partial(by_geartrain, plugins=("fast",)),
    "Lightning, one log": partial(by_lightning, log=True),
}
WITH_BAR = {"geartrain, one log and the bar": partial(by_geartrain, log=True, bar=True)}


@contextlib.contextmanager
def terminal() -> Iterator[None]:
    """A pseudo-terminal as standard output and error; another process reads it."""
    os.environ.update(TERM="xterm-256color", COLUMNS="120")
    ours, theirs = os.openpty()
    with (
        subprocess.Popen(
            ["cat"], stdin=ours, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as reader,
        os.fdopen(theirs, "w") as stream,
        contextlib.redirect_stdout(stream),
        contextlib.redirect_stderr(stream),
    ):
        yield
        reader.kill()


def measure(work: Work, loops: dict[str, Trainer], steps: int, rounds: int) -> dict[str, Any]:
    """Return µs per step of each trainer, its ratio to the loop by hand, and whether it is equal.

    Args:
        steps: of a turn.
        rounds: in each, all trainers have a turn; the first fifth warms up, and the last one has
            the ends of the runs.
    """
    torch.manual_seed(1)
    batches = [work.batch() for _ in range(steps)]
    runs, absent = alternate(
        {name: partial(train, work, watch=Watch()) for name, train in loops.items()},
        batches,
        rounds,
    )
    kept = slice(rounds // 5, rounds - 1)
    hand = runs["by hand"]
    rows = {
        name: {
            "us": round(statistics.median(run.seconds[kept]) / steps * 1e6, 1),
            **ratios(run.seconds[kept], hand.seconds[kept]),
            "equal": all(
                torch.equal(a, b)
                for a, b in zip(
                    hand.result.state_dict().values(), run.result.state_dict().values(), strict=True
                )
            ),
        }
        for name, run in runs.items()
    }
    return {"rows": rows, "void": abs(rows[AGAIN]["ratio"] - 1) > TRUSTED, "not installed": absent}


def table(facts: dict[str, Any]) -> str:
    """Return a Markdown table: a row for each trainer, a column for each network."""
    names = list(dict.fromkeys(name for fact in facts.values() for name in fact["rows"]))
    lines = [f"| | {' | '.join(f'`{work}`' for work in facts)} |", "|---" * (1 + len(facts)) + "|"]
    for name in names:
        cells = []
        for fact in facts.values():
            row = fact["rows"].get(name)
            cells.append(
                "not installed"
                if row is None
                else f"{row['us']:,} µs"
                if name == "by hand"
                else f"{row['ratio']:.2f} ({row['quartiles'][0]:.2f} to {row['quartiles'][1]:.2f})"
                + ("" if row["equal"] else ", other bits")
            )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [
        f"\n`{work}` is void: the loop by hand over itself is {fact['rows'][AGAIN]['ratio']}."
        for work, fact in facts.items()
        if fact["void"]
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", nargs="+", choices=list(ON_CPU), default=["mlp"])
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd")
    parser.add_argument("--steps", type=int, default=20, help="of a turn")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--rows", nargs="+", choices=list(LOOPS), default=list(LOOPS))
    parser.add_argument("--bar", action="store_true", help="also with the bar on a terminal")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    loops = {
        name: train for name, train in LOOPS.items() if name in {*options.rows, "by hand", AGAIN}
    }
    loops |= WITH_BAR if options.bar else {}
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    pin()
    torch.set_num_threads(1)
    optimizer = {"sgd": sgd, "adam": adam}[options.optimizer]
    with terminal() if options.bar else contextlib.redirect_stdout(sys.stderr):
        facts = {
            name: measure(
                replace(ON_CPU[name], optimizer=optimizer), loops, options.steps, options.rounds
            )
            for name in options.what
        }
    print(json.dumps(facts, indent=2) if options.json else table(facts))


if __name__ == "__main__":
    main()
