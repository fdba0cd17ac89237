"""``geartrain verify resume|ranks TARGET``: train several times, and compare bit for bit."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from geartrain import TrainingError, UsageError
from geartrain.plugin_api import nearest
from geartrain_cli.help import CommandParser
from geartrain_cli.tables import Group, show, show_text
from geartrain_cli.target import Target
from geartrain_tools import trials
from geartrain_tools.checkpoints.text import print_json
from geartrain_tools.verify import every_step, ranks, resume

_CHECKS = {"resume": resume.CHECK, "ranks": ranks.CHECK}
#: Options of fit that a check sets itself.
_SET = ("--output", "--resume", "--no-output")


def command(
    name: str,
    argv: list[str],
    target: Target | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Check that a user's module, data and options train to equal bits.

    Args:
        name: of the command.
        argv: the check, the target unless a script calls it, and options.
        target: of a script, which every run starts again.
        defaults: of that script.

    Raises:
        TrainingError: a run failed, or runs differ.
        UsageError: an argument is wrong, or the run has too few steps.
    """
    if argv[:1] in (["-h"], ["--help"]):
        show_text(f"usage: geartrain {name} {'|'.join(_CHECKS)} TARGET [options]")
        print()
        examples = [(example,) for each in _CHECKS.values() for example in each.examples]
        checks = [(f"{key} TARGET", each.summary) for key, each in _CHECKS.items()]
        show([Group("examples", examples), Group("checks", checks)])
        print()
        show_text(f"geartrain {name} {next(iter(_CHECKS))} --help lists the options of a check.")
        raise SystemExit(0)
    if not argv or argv[0] not in _CHECKS:
        given = "nothing to verify is named."
        if argv:
            given = f"there is no {argv[0]!r} to verify. {nearest(argv[0], _CHECKS)}"
        raise UsageError(f"{given} Fix: geartrain {name} {'|'.join(_CHECKS)} TARGET")
    check = _CHECKS[argv[0]]
    parser = CommandParser(f"{name} {argv[0]}", check.summary, check.examples)
    check.add_options(parser)
    parser.add_argument(
        "--steps", type=int, default=20, help="steps of each run; default 20; 0: as many as fit has"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    hint = "leave it out; the runs are in temporary folders"
    options, arguments = trials.parse(parser, argv[1:], target is not None, _SET, hint)
    if options.steps < 0:
        raise UsageError(f"--steps {options.steps}: not a number of steps. Fix: 0 or more")
    arguments += check.arguments(options)
    fit = trials.fit_command(*arguments, "--log-every-n-steps", "1")
    fit += ["--plugin", every_step.__file__ + ":EveryStep"]
    fit += ["--max-steps", str(options.steps)] if options.steps else []
    with tempfile.TemporaryDirectory(prefix="geartrain-verify-") as folder:
        result = check.run(fit, Path(folder), options)
    if options.json:
        print_json(result.facts)
    if result.failure:
        raise TrainingError(result.failure)
