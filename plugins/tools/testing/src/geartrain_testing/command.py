"""``geartrain conformance NAME``: run the conformance kit on an installed strategy."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from geartrain import TrainingError, UsageError
from geartrain.plugin_api import InstalledPlugin, Registry, nearest
from geartrain_cli.help import CommandParser

_SUITE = '''\
"""The tests that `geartrain conformance` runs. You can copy them to your plugin's tests."""

from geartrain_testing import Capabilities, StrategyConformance


class Test{title}(StrategyConformance):
    strategy = {name!r}
    devices = {devices}
    options = {options!r}
    capabilities = {capabilities}
    deadline = {deadline}
'''
#: The cases of --quick: some about gradients, data, metrics, collectives and leftovers; about 10 s.
_QUICK = (
    "(equals_one_process and (sgd or accumulation)) or communication or coverage"
    " or test_metrics or barrier or metadata or is_left"
)


def command(name: str, argv: list[str]) -> None:
    """Write the test class into a temporary folder and run pytest on it.

    Raises:
        UsageError: the strategy, an option or a capability is unknown, or ``-k`` matches no test.
        TrainingError: a test failed; the folder with the evidence is kept.
    """
    parser = CommandParser(
        name,
        "run the conformance kit on an installed strategy",
        (
            "geartrain conformance ddp --quick",
            "geartrain conformance ddp --devices 2",
        ),
    )
    parser.add_argument(
        "strategy",
        metavar="NAME",
        nargs="?",
        help="the entry point's name of an installed strategy",
    )
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="devices to run on; default 2 and for some cases 3, or 1 if the strategy drives one",
    )
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="CAPABILITY",
        help="declare a capability unsupported",
    )
    parser.add_argument(
        "--convergence",
        type=float,
        metavar="X",
        help="approximate by design: see docs/conformance.md",
    )
    parser.add_argument(
        "--deadline",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds that one scenario may take; default 60",
    )
    parser.add_argument(
        "--quick", action="store_true", help="the most useful cases, in about ten seconds"
    )
    parser.add_argument("-k", metavar="EXPR", help="pytest's: run the tests whose names match")
    try:
        given, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UsageError(str(error)) from error
    if given.strategy is None:
        raise UsageError(
            "the strategy's name is missing. "
            "Fix: geartrain conformance NAME; geartrain plugins lists installed strategies"
        )
    if not 0 < given.deadline < float("inf"):
        raise UsageError(f"--deadline {given.deadline:g} must be a number of seconds above 0")
    registry = Registry()
    candidate = registry.find("strategy", given.strategy)
    options = _options(registry.load(candidate), candidate, unknown)
    capabilities = _capabilities(registry, candidate, options, given.without, given.convergence)
    chosen = [
        expression
        for expression in (_QUICK if given.quick else None, given.k)
        if expression is not None
    ]
    _run(
        candidate.name,
        _SUITE.format(
            title=candidate.name.title().replace("_", "").replace("-", ""),
            name=candidate.name,
            devices=_devices(candidate.name, options, given.devices),
            options=options,
            capabilities=capabilities,
            deadline=given.deadline,
        ),
        ["-k", " and ".join(f"({chosen})" for chosen in chosen)] if chosen else [],
    )


def _options(cls: Any, candidate: InstalledPlugin, argv: list[str]) -> dict[str, Any]:
    """Return the strategy's options from the command line, with the types of its ``__init__``."""
    from jsonargparse import ArgumentError, ArgumentParser

    tokens = []
    for token in argv:
        key, equals, value = token.partition("=")
        if token.startswith("--"):
            if not key.startswith("--strategy."):
                known = (
                    "--devices, --strategy.OPTION, --without, --convergence, "
                    "--deadline, --quick, -k"
                )
                raise UsageError(f"there is no option {key}. Known: {known}")
            token = key.replace("-", "_").replace("__", "--", 1) + equals + value
        tokens.append(token)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls, "strategy")
    try:
        values = parser.parse_args(tokens)
    except ArgumentError as error:
        raise UsageError(f"{candidate.label}: {error}") from error
    names = [
        token.partition("=")[0].removeprefix("--strategy.")
        for token in tokens
        if token.startswith("--strategy.")
    ]
    return {name: values["strategy"][name] for name in names}


def _devices(name: str, options: dict[str, Any], given: int | None) -> int:
    """Return the number of devices: the given one, otherwise 2, or 1 if the strategy refuses 2.

    Raises:
        UsageError: the strategy refuses to plan, so each case would fail.
    """
    from geartrain import Trainer
    from geartrain_testing import StrategyConformance

    devices = 2 if given is None else given
    try:
        Trainer(
            accelerator=StrategyConformance.accelerator,
            devices=devices,
            strategy=name,
            strategy_options=options,
        )
    except UsageError:
        if given is not None:
            raise
        return _devices(name, options, 1)
    except Exception:  # the strategy has a bug, which its cases report
        pass
    return devices


def _capabilities(
    registry: Registry,
    candidate: InstalledPlugin,
    options: dict[str, Any],
    without: list[str],
    convergence: float | None,
) -> str:
    """Return the source text of the expected capabilities: the declared ones less ``--without``."""
    from geartrain_testing.capabilities import SWITCHES, Capabilities

    for name in without:
        if name not in SWITCHES:
            raise UsageError(
                f"--without {name}: there is no such capability. {nearest(name, SWITCHES)}"
            )
    if not without and convergence is None:
        return "None  # as the strategy declares"
    plugin = registry.select("strategy", candidate.name, options).plugin
    declared = Capabilities.of(getattr(plugin, "capabilities", None), candidate.label)
    changes: dict[str, Any] = dict.fromkeys(without, False)
    if convergence is not None:
        changes["convergence"] = convergence
    return f"Capabilities(**{asdict(replace(declared, **changes))!r})"


def _run(name: str, suite: str, arguments: list[str]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="geartrain-conformance-"))
    (folder / "test_conformance.py").write_text(suite)
    # With its own configuration, pytest does not use that of the project in the current folder.
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -ra -p no:cacheprovider\n")
    # In a new process, because this one has imported modules, and a strategy may end its process.
    pytest = [sys.executable, "-m", "pytest", "--basetemp", str(folder / "runs")]
    code = subprocess.call([*pytest, *arguments, str(folder)])
    if code == 0:
        shutil.rmtree(folder, ignore_errors=True)
        return
    if code == 5:
        shutil.rmtree(folder, ignore_errors=True)
        raise UsageError("-k matches no test. Fix: docs/conformance.md lists the tests")
    raise TrainingError(
        f"the strategy {name!r} does not conform; pytest printed the failures above. "
        f"The tests and their files: {folder}"
    )
