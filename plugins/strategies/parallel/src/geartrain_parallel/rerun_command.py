"""The command line of other ranks: the same as this program's, in the same start directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from geartrain import UsageError
from geartrain.plugin_api import START_COMMAND


def command() -> list[str]:
    """Return the command to run again.

    Raises:
        UsageError: the program has no command line, a second run would not do the same, or its file
            cannot be found from the start directory.
    """
    reason = START_COMMAND.reason_not_rerunnable()
    if reason:
        raise UsageError(
            f"other ranks are started by running the same command again, and {reason}. "
            "Fix: put the program in a file and run that, or --strategy ddp_spawn "
            "(pip install geartrain-spawn), or --strategy dp (pip install geartrain-dp)"
        )
    main, directory = sys.modules["__main__"], START_COMMAND.directory
    is_module = getattr(main, "__spec__", None) is not None  # python -m
    script = None if is_module else getattr(main, "__file__", None)
    # If a program runs another script as __main__, its arguments do not name that script.
    named = [
        argument
        for argument in sys.orig_argv[1:]
        if script is not None and Path(argument).name == Path(script).name
    ]
    if (
        script is not None
        and named
        and not any(_is_same_file(Path(directory, argument), script) for argument in named)
    ):
        raise UsageError(
            f"other ranks are started by running the same command again, and {script} is not found "
            f"from {directory}, the current directory when geartrain was imported. "
            "Fix: import geartrain before os.chdir()"
        )
    return [sys.executable, *sys.orig_argv[1:]]


def _is_same_file(path: Path, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except (OSError, ValueError):
        return False
