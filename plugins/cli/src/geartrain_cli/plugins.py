"""``geartrain plugins``: list installed plugins and commands, and why a plugin cannot be used. Reads metadata alone unless --probe."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys

from geartrain import UsageError
from geartrain.plugin_api import Registry


def command(name: str, argv: list[str]) -> None:
    """Print one row for each installed plugin."""
    parser = argparse.ArgumentParser(
        prog=f"geartrain {name}", allow_abbrev=False, description=__doc__, exit_on_error=False
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="a list of {name, kind, state, reason, distribution, version}",
    )
    parser.add_argument(
        "--probe",
        action="store_true",
        help="import each plugin and ask accelerators whether they can serve here",
    )
    parser.add_argument(
        "--block",
        action="append",
        default=[],
        metavar="NAME",
        help="a plugin's name, or DISTRIBUTION[name], that must not be chosen",
    )
    try:
        options, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UsageError(str(error)) from error
    if unknown:
        raise UsageError(f"there is no option {unknown[0]}. Known: --json, --probe, --block NAME")
    registry = Registry(options.block)
    if options.probe:
        with contextlib.redirect_stdout(
            sys.stderr
        ):  # output of plugins while they are imported does not belong to the answer
            for candidate in registry.candidates:
                registry.probe(candidate)
    rows = [candidate.as_dict() for candidate in registry.candidates]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Column, Table

    table = Table(
        *[
            Column(name, overflow="fold")
            for name in ("name", "kind", "state", "reason", "distribution", "version")
        ]
    )
    for row in rows:
        table.add_row(
            row["name"],
            row["kind"],
            row["state"],
            row["reason"],
            row["distribution"],
            row["version"],
        )
    Console(markup=False).print(table)  # a reason may have brackets: acme[chip]
