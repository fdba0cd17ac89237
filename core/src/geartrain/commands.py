"""The script ``geartrain``, which is the command line of the distribution geartrain-cli."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from geartrain.errors.distributions import import_from


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0 done, 1 the run failed, 2 wrong usage.
    """
    try:
        command_line = import_from("geartrain_cli", "the command line")
    except ImportError as error:
        print(f"geartrain: {error}", file=sys.stderr)
        return 2
    code: int = command_line.main(argv)
    return code
