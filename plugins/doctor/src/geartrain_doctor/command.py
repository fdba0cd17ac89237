"""``geartrain doctor``: examine this machine, and end with what to fix.

Each check stands alone: one that raises is reported, and the others go on. No device is initialised in this process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

from geartrain import GeartrainError, UsageError
from geartrain.plugin_api import Registry, nearest
from geartrain_doctor import machine, network, processes, software
from geartrain_doctor.findings import Finding, Section, examine

_OPTIONS = ("--json", "--accelerator", "--backend", "--pickle")


def command(name: str, argv: list[str]) -> None:
    """Make every check and print what it found.

    Raises:
        UsageError: wrong options, an unknown accelerator, a backend that cannot be tried, or a TARGET that cannot be read.
        GeartrainError: something must be fixed; it has been printed.
    """
    options, rest = _read(name, argv)
    registry = Registry()
    if options.accelerator.lower() not in ("auto", "gpu"):
        registry.find("accelerator", options.accelerator)
    with contextlib.redirect_stdout(
        sys.stderr
    ):  # what a plugin or a target prints is no part of our answer
        request = _target(options.pickle, rest)
        sections = list(_examine(options, registry, request))
    findings = list(dict.fromkeys(finding for section in sections for finding in section.findings))
    fixes, warnings = (
        [finding for finding in findings if finding.must is must] for must in (True, False)
    )
    if options.json:
        print(json.dumps(_facts(sections, fixes, warnings), indent=2))
    else:
        from geartrain_doctor.tables import show

        show(sections, fixes, warnings)
        sys.stdout.flush()
    if fixes:
        raise GeartrainError(
            "1 thing must be fixed" if len(fixes) == 1 else f"{len(fixes)} things must be fixed"
        )


def _read(name: str, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command's own options, and those of a TARGET's classes."""
    parser = argparse.ArgumentParser(
        prog=f"geartrain {name}", allow_abbrev=False, description=__doc__, exit_on_error=False
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object with everything that was found"
    )
    parser.add_argument(
        "--accelerator",
        default="auto",
        metavar="NAME",
        help="the accelerator that must serve; default auto",
    )
    parser.add_argument(
        "--backend",
        metavar="NAME",
        help="torch.distributed's backend for the all-reduce; default as the accelerator is",
    )
    parser.add_argument(
        "--pickle",
        metavar="TARGET",
        help="look for what cannot be pickled in a target; its --model.ARG and --data.ARG may follow",
    )
    try:
        options, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UsageError(str(error)) from error
    following = False
    for token in rest:
        if token.startswith(("--model.", "--data.")):
            if options.pickle is None:
                raise UsageError(
                    f"{token.partition('=')[0]} is an option of a target. Fix: --pickle TARGET {token}"
                )
            following = "=" not in token
        elif token.startswith("-") or not following:
            raise UsageError(f"there is no option {token}. {_hint(token)}")
        else:
            following = False
    return options, rest


def _hint(token: str) -> str:
    hint = nearest(token, _OPTIONS)
    return hint if hint.startswith("Did") else f"Known: {', '.join(_OPTIONS)}."


def _target(target: str | None, rest: list[str]) -> Any:
    """What ``fit`` would make of a target and its options; ``None`` without one, or where torch cannot be imported."""
    if target is None:
        return None
    try:
        from geartrain_cli.arguments import read_arguments
    except Exception:  # _pickles reports it, and the other checks go on
        return None

    # Where it would train changes nothing of what pickles, and may be what is wrong here.
    return read_arguments(
        "fit",
        [target, "--accelerator", "cpu", "--devices", "1", "--strategy", "single", *rest],
        None,
    )


def _examine(options: argparse.Namespace, registry: Registry, request: Any) -> Iterator[Section]:
    yield examine("versions", software.versions, registry)
    accelerators = examine("accelerators", software.accelerators, registry, options.accelerator)
    yield accelerators
    yield examine("plugins", software.plugins, registry)
    chosen, devices = _chosen(accelerators.facts)
    if options.backend is not None:
        processes.check_backend(options.backend, chosen, devices)
    yield examine("all_reduce", processes.processes, options.backend, chosen, devices)
    yield examine("network", network.network)
    yield examine("machine", machine.machine)
    yield examine("environment", network.environment)
    if options.pickle is not None:
        yield examine("pickle", _pickles, request)


def _pickles(section: Section, request: Any) -> None:
    from geartrain_doctor.pickles import pickles  # fails where torch does

    pickles(section, request)


def _chosen(accelerators: dict[str, Any]) -> tuple[dict[str, Any] | None, int | None]:
    """The accelerator that would be taken, and how many devices it has."""
    chosen = accelerators.get("chosen")
    rows = accelerators.get("accelerators", [])
    return chosen, next(
        (
            row["device_count"]
            for row in rows
            if chosen is not None and row["name"] == chosen["name"]
        ),
        None,
    )


def _facts(
    sections: list[Section], fixes: list[Finding], warnings: list[Finding]
) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        **{section.name: section.facts for section in sections},
        "failed": {
            section.name: section.error for section in sections if section.error is not None
        },
        "problems": [finding.as_dict() for finding in fixes],
        "warnings": [finding.as_dict() for finding in warnings],
    }
