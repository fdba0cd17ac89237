"""``geartrain doctor``: check this machine and list the problems to fix.

If a check fails, its error is reported and the other checks continue. This process initialises no
device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from geartrain import GeartrainError, UsageError
from geartrain.plugin_api import Registry, nearest
from geartrain_cli.help import CommandParser
from geartrain_tools.doctor import machine, network, processes, software
from geartrain_tools.doctor.findings import Finding, Section, examine

_OPTIONS = ("--json", "--accelerator", "--backend", "--pickle")


def command(name: str, argv: list[str]) -> None:
    """Run every check and print its findings.

    Raises:
        UsageError: an option is wrong, the accelerator is unknown, the backend cannot be used, or
            TARGET cannot be read.
        GeartrainError: something must be fixed; the output lists it.
    """
    options, others = _read(name, argv)
    registry = Registry()
    if options.accelerator.lower() not in ("auto", "gpu"):
        registry.find("accelerator", options.accelerator)
    # Output of plugins and of the target must not mix with the report.
    with contextlib.redirect_stdout(sys.stderr), _progress() as says:
        request = _target(options.pickle, others)
        sections = list(_examine(options, registry, request, says))
    findings = list(dict.fromkeys(finding for section in sections for finding in section.findings))
    fixes, warnings = (
        [finding for finding in findings if finding.must is must] for must in (True, False)
    )
    if options.json:
        print(json.dumps(_facts(sections, fixes, warnings), indent=2))
    else:
        from geartrain_tools.doctor.tables import show

        show(sections, fixes, warnings)
        sys.stdout.flush()
    if fixes:
        raise GeartrainError(
            "1 thing must be fixed" if len(fixes) == 1 else f"{len(fixes)} things must be fixed"
        )


def _read(name: str, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the command's options, and the remaining options for the classes of TARGET."""
    parser = CommandParser(
        name,
        "check this machine and list the problems to fix; no device is initialised here",
        ("geartrain doctor", "geartrain doctor --pickle file.py"),
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object with all facts and problems"
    )
    parser.add_argument(
        "--accelerator",
        default="auto",
        metavar="NAME",
        help="the accelerator that must be usable; default auto",
    )
    parser.add_argument(
        "--backend",
        metavar="NAME",
        help="torch.distributed backend of the all-reduce; default: chosen by the accelerator",
    )
    parser.add_argument(
        "--pickle",
        metavar="TARGET",
        help="find attributes of a target that cannot be pickled; accepts --model.ARG, --data.ARG",
    )
    try:
        options, others = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UsageError(str(error)) from error
    following = False
    for token in others:
        if token.startswith(("--model.", "--data.")):
            if options.pickle is None:
                option = token.partition("=")[0]
                raise UsageError(f"{option} is an option of a target. Fix: --pickle TARGET {token}")
            following = "=" not in token
        elif token.startswith("-") or not following:
            raise UsageError(f"there is no option {token}. {_hint(token)}")
        else:
            following = False
    return options, others


def _hint(token: str) -> str:
    hint = nearest(token, _OPTIONS)
    return hint if hint.startswith("Did") else f"Known: {', '.join(_OPTIONS)}."


def _target(target: str | None, rest: list[str]) -> Any:
    """Return ``fit``'s request for a target; ``None`` without a target or an importable torch."""
    if target is None:
        return None
    try:
        from geartrain_cli.arguments import read_arguments
    except Exception:  # _pickles reports it, and the other checks continue
        return None

    # The device does not change which objects pickle, and a broken one must not stop this check.
    return read_arguments(
        "fit",
        [target, "--accelerator", "cpu", "--devices", "1", "--strategy", "single", *rest],
        None,
    )


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the name of the running check, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda name: None
        return
    from rich.console import Console

    with Console(stderr=True).status("checking") as status:
        yield lambda name: status.update(f"checking: {name.replace('_', ' ')}")


def _examine(
    options: argparse.Namespace, registry: Registry, request: Any, says: Callable[[str], None]
) -> Iterator[Section]:
    def check(name: str, function: Callable[..., None], *arguments: Any) -> Section:
        says(name)
        return examine(name, function, *arguments)

    yield check("versions", software.versions, registry)
    accelerators = check("accelerators", software.accelerators, registry, options.accelerator)
    yield accelerators
    yield check("plugins", software.plugins, registry)
    chosen, devices = _chosen(accelerators.facts)
    if options.backend is not None:
        processes.check_backend(options.backend, chosen, devices)
    yield check("all_reduce", processes.processes, options.backend, chosen, devices)
    yield check("network", network.network)
    yield check("machine", machine.machine)
    yield check("environment", network.environment)
    if options.pickle is not None:
        yield check("pickle", _pickles, request)


def _pickles(section: Section, request: Any) -> None:
    from geartrain_tools.doctor.pickles import pickles  # here, because it imports torch

    pickles(section, request)


def _chosen(accelerators: dict[str, Any]) -> tuple[dict[str, Any] | None, int | None]:
    """Return the accelerator that a run would take, and its number of devices."""
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
    """Return the object that ``--json`` prints."""
    return {
        **{section.name: section.facts for section in sections},
        "failed": {
            section.name: section.error for section in sections if section.error is not None
        },
        "problems": [finding.as_dict() for finding in fixes],
        "warnings": [finding.as_dict() for finding in warnings],
    }
