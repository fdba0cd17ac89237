"""Fits in new processes, for a command that takes a target and trains it several times."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Collection, Sequence

from geartrain import UsageError
from geartrain_cli.help import CommandParser


def parse(
    parser: CommandParser, argv: Sequence[str], in_script: bool, refused: Collection[str], hint: str
) -> tuple[argparse.Namespace, list[str]]:
    """Return a command's options, and the target and the options of ``fit``.

    Args:
        in_script: a script calls the command, and ``argv`` has no target.
        refused: options of ``fit`` that the command sets itself.
        hint: text of the error about such an option, after ``Fix:``.

    Raises:
        UsageError: an option is wrong.
    """
    try:
        options, arguments = parser.parse_known_args(argv if argv or in_script else ["--help"])
    except argparse.ArgumentError as error:
        raise UsageError(f"{error}. Fix: {parser.prog} --help") from error
    for argument in arguments:
        if argument.partition("=")[0].replace("_", "-") in refused:
            raise UsageError(f"{parser.prog} sets {argument} itself. Fix: {hint}")
    return options, arguments


def fit_command(*arguments: str) -> list[str]:
    """Return the command line of ``fit`` in the program that runs now."""
    # The program, without the command and its arguments.
    program = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    return [*program, "fit", *arguments]


def run_apart(
    arguments: Sequence[str], variable: str, value: str
) -> subprocess.CompletedProcess[str]:
    """Run a command line in a new process with one more variable; its errors are in ``stdout``."""
    return subprocess.run(
        arguments,
        env={**os.environ, variable: value},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
