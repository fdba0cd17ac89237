"""Print the metrics that a run ended with."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from geartrain import UsageError


def command(name: str, argv: list[str]) -> None:
    """Print one line for each metric: ``geartrain mine RUN``.

    Args:
        name: the name of the entry point, as the user typed it.
        argv: the arguments after it.

    Raises:
        UsageError: the folder holds no run that has ended. The command line then exits with 2.
    """
    parser = argparse.ArgumentParser(prog=f"geartrain {name}", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder that a run got as --output")
    folder: Path = parser.parse_args(argv).run
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"{folder} holds no run that has ended. Fix: the folder that a run got as --output") from error
    for metric, value in summary["metrics"].items():
        print(f"{metric} {value}")
