"""``geartrain compare TARGET --strategies A,B`` and ``geartrain compare RUN_A RUN_B``."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from geartrain import TrainingError, UsageError
from geartrain.plugin_api import user_path
from geartrain_cli.help import CommandParser
from geartrain_cli.tables import show_text
from geartrain_cli.target import Target
from geartrain_tools import trials
from geartrain_tools.checkpoints.text import print_json, print_tables, printable
from geartrain_tools.compare import measures, runs, strategies

_EXAMPLES = (
    "geartrain compare train.py --strategies ddp,fsdp,bagua:algorithm=bytegrad --devices 2",
    "geartrain compare train.py --strategies single,ddp --devices 2 --steps 200 --keep runs/all",
    "geartrain compare runs/1 runs/2",
)
#: Options of fit that the command sets itself.
_SET = ("--strategy", "--output", "--resume", "--no-output", "--max-steps")


def command(
    name: str,
    argv: list[str],
    target: Target | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Compare strategies on a user's module and data, or two runs.

    Args:
        name: of the command.
        argv: the target unless a script calls it, and options; or the folders of two runs.
        target: of a script, which every run starts again.
        defaults: of that script.

    Raises:
        TrainingError: no strategy trained.
        UsageError: an argument is wrong, or two runs have no step in common.
    """
    parser = CommandParser(
        name, "compare strategies on your module and data, or two runs", _EXAMPLES
    )
    parser.add_argument(
        "--strategies",
        metavar="LIST",
        help="with options after a colon: ddp,bagua:algorithm=bytegrad:hierarchical=false",
    )
    parser.add_argument("--steps", type=int, default=50, help="steps of each run; default 50")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each strategy; default 3")
    parser.add_argument(
        "--keep", metavar="DIR", help="keep the runs in this folder, for geartrain report"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    hint = "--strategies, --steps or --keep"
    options, arguments = trials.parse(parser, argv, target is not None, _SET, hint)
    folders = [Path(each).expanduser() for each in arguments]
    if options.strategies is None:
        if len(folders) != 2 or not all(map(runs.is_run, folders)):
            message = f"no strategies, and {' '.join(arguments)!r} are not the folders of two runs"
            raise UsageError(f"{message}. Fix: --strategies ddp,fsdp, or RUN_A RUN_B")
        facts = runs.compare_runs(*folders)
        if options.json:
            print_json(facts)
        else:
            print_tables(runs.verdict(facts), runs.tables(facts))
        return
    _compare_strategies(options, arguments)


def _compare_strategies(options: argparse.Namespace, arguments: list[str]) -> None:
    for option in ("steps", "rounds"):
        least = 2 if option == "steps" else 1
        if getattr(options, option) < least:
            given = f"--{option} {getattr(options, option)}"
            raise UsageError(f"{given}: too few. Fix: {least} or more")
    choices = strategies.read_choices(options.strategies)
    keep = user_path(options.keep, "--keep") if options.keep else None
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise UsageError(f"--keep {keep} is not empty. Fix: use a new folder")
    fit = trials.fit_command(*arguments, "--max-steps", str(options.steps))
    fit += ["--enable-progress-bar", "false", "--plugin", f"{measures.__file__}:Measures"]
    temporary = tempfile.TemporaryDirectory(prefix="geartrain-compare-")
    with temporary if keep is None else nullcontext(keep) as folder:
        rows = strategies.compare_strategies(choices, fit, Path(folder), options.rounds)
    facts = strategies.facts_of(rows)
    advice = strategies.recommendation(facts)
    if options.json:
        print_json({"strategies": facts, "recommendation": advice, "rounds": options.rounds})
    else:
        print_tables(advice, strategies.tables(facts))
        if keep is not None:
            print()
            show_text(printable(f"geartrain report {keep} draws the curves of the runs"))
    if all("error" in fact for fact in facts):
        raise TrainingError(f"no strategy trained: {facts[0]['strategy']}: {facts[0]['error']}")
