"""``geartrain plugins``: list installed plugins, and why a plugin cannot be used; lock them."""

from __future__ import annotations

import argparse
import json

from geartrain import UsageError
from geartrain.plugin_api import Registry
from geartrain_cli import lock
from geartrain_cli.help import CommandParser
from geartrain_cli.tables import Group, by_version, show, show_text


def command(name: str, argv: list[str]) -> None:
    """Print one row per installed plugin. Without --probe only metadata is read."""
    parser = CommandParser(
        name,
        "list installed plugins, and why a plugin cannot be used",
        ("geartrain plugins", "geartrain plugins --probe", "geartrain plugins lock"),
    )
    parser.add_argument(
        "lock",
        nargs="*",
        metavar="[lock [FILE]]",
        help=f"write versions and hashes of all plugins to FILE ({lock.FILE}), for --locked",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="a list of {name, kind, state, reason, distribution, version}",
    )
    parser.add_argument(
        "--probe",
        action="store_true",
        help="import each plugin, and ask accelerators if they can be used here",
    )
    parser.add_argument(
        "--block",
        action="append",
        default=[],
        metavar="NAME",
        help="a plugin's name, or DISTRIBUTION[name], that must not be selected",
    )
    try:
        options, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UsageError(str(error)) from error
    if unknown:
        raise UsageError(f"there is no option {unknown[0]}. Known: --json, --probe, --block NAME")
    if options.lock:
        if others := [argument for argument in argv if argument.startswith("--")]:
            raise UsageError(f"lock takes no {others[0]}. Fix: geartrain plugins lock [FILE]")
        _lock(*options.lock)
        return
    registry = Registry(options.block)
    if options.probe:
        for candidate in registry.candidates:
            registry.check_usable(candidate)
    rows = [candidate.as_dict() for candidate in registry.candidates]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    groups: dict[str, Group] = {}
    for row in rows:
        kind = row["kind"]
        title = f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s"
        group = groups.setdefault(kind, Group(title, columns=("state", "distribution")))
        group.rows.append((row["name"], row["state"], row["distribution"], row["reason"]))
    versions = {row["distribution"]: row["version"] for row in rows}
    show([*groups.values(), Group("versions", by_version(versions))])
    if not options.probe:
        print()
        hint = "geartrain plugins --probe imports each plugin and asks it."
        show_text(f"installed: not probed. {hint}")


def _lock(action: str, file: str = lock.FILE, *others: str) -> None:
    if action != "lock" or others:
        unknown = others[0] if action == "lock" else action
        raise UsageError(f"{unknown!r} is no action. Fix: geartrain plugins lock [FILE]")
    print(f"{file} has {lock.write(file)} distributions. Use it: geartrain fit TARGET --locked")
