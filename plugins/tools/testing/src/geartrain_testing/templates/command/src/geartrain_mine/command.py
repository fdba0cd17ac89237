"""Print the final metrics of a run."""

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
        UsageError: the folder holds no finished run. The command line then exits with 2.
    """
    parser = argparse.ArgumentParser(prog=f"geartrain {name}", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="the --output folder of a run")
    folder: Path = parser.parse_args(argv).run
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        fix = "Fix: pass the --output folder of a run"
        raise UsageError(f"{folder} holds no finished run. {fix}") from error
    for metric, value in summary["metrics"].items():
        print(f"{metric} {value}")
