"""``geartrain scale DIR --devices N``: change the number of processes of a run that trains."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from geartrain import TrainingError, UsageError
from geartrain.plugin_api import replacing, user_path
from geartrain_cli.help import CommandParser

#: The file in the run's folder with the number of processes that is asked for. The run removes it.
REQUEST = "processes.request"
#: Seconds in which a run that trains takes a request.
_PATIENCE = 10.0


def command(name: str, argv: list[str]) -> None:
    """Ask a run for another number of processes.

    Raises:
        UsageError: the folder is not that of a run with elastic, or the number is not possible.
        TrainingError: the run does not answer.
    """
    parser = CommandParser(
        name,
        "change the number of processes of a run with --strategy elastic, while it trains",
        ("geartrain scale runs/1 --devices 3",),
    )
    parser.add_argument("folder", metavar="DIR", help="the run's folder (--output of fit)")
    parser.add_argument("--devices", type=int, required=True, help="the number of processes")
    try:
        given = parser.parse_args(argv)
    except argparse.ArgumentError as error:
        raise UsageError(str(error)) from error
    folder = user_path(given.folder, "DIR")
    ranks = _ranks(folder)
    if not 1 <= given.devices <= ranks:
        raise UsageError(
            f"--devices {given.devices}: the run has {ranks} ranks. Fix: a number from 1 to {ranks}"
        )
    request = folder / REQUEST
    with replacing(request) as file:
        file.write(f"{given.devices}\n".encode())
    deadline = time.monotonic() + _PATIENCE
    while request.exists():
        has_ended = (folder / "summary.json").exists()
        if has_ended or time.monotonic() > deadline:
            request.unlink(missing_ok=True)
            problem = "has ended" if has_ended else f"has not answered in {_PATIENCE:g} s"
            raise TrainingError(
                f"the run in {folder} {problem}. Fix: pass the folder of a run that trains"
            )
        time.sleep(0.1)
    print(f"scale: the run in {folder} starts {given.devices} processes, which take over")


def _ranks(folder: Path) -> int:
    """Return the number of ranks of the run in a folder."""
    try:
        plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        strategy, ranks = plan["strategy"]["name"], int(plan["processes"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{folder} is not the folder of a run ({type(error).__name__}: {error}). "
            "Fix: pass the folder that fit got as --output"
        ) from error
    if strategy != "elastic":
        raise UsageError(
            f"the run in {folder} has the strategy {strategy}, whose processes are fixed. "
            "Fix: --strategy elastic for the run"
        )
    return ranks
