"""The command line of other ranks: the same as this program's, in the same start directory."""

from __future__ import annotations

import bdb
import os
import sys
import threading
from pathlib import Path

from geartrain import UsageError
from geartrain.plugin_api import START_DIRECTORY


def command() -> list[str]:
    """Return the command to run again.

    Raises:
        UsageError: the program has no command line, a second run would not do the same, or its file
            cannot be found from the start directory.
    """
    reason = reason_not_rerunnable()
    if reason:
        raise UsageError(
            f"other ranks are started by running the same command again, and {reason}. "
            "Fix: put the program in a file and run that, or --strategy ddp_spawn "
            "(pip install geartrain-spawn), or --strategy dp (pip install geartrain-dp)"
        )
    main, directory = sys.modules["__main__"], START_DIRECTORY
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


def reason_not_rerunnable() -> str | None:
    """Return why this program's command cannot be run again, or ``None`` if it can."""
    main = sys.modules.get("__main__")
    if "ipykernel" in sys.modules:
        return "a notebook has none"
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return "an interactive session has none"
    # The variable alone is inherited by every child of a test.
    if "PYTEST_CURRENT_TEST" in os.environ and "_pytest" in sys.modules:
        return "under pytest it would run the tests again"
    if _debugged():
        return "under a debugger each rank would wait for it"
    file = getattr(main, "__file__", None)
    is_stream = str(file).startswith(("<stdin>", "/dev/", "/proc/"))
    if is_stream or (file is None and sys.argv[:1] != ["-c"]):
        return "a program read from standard input has none"
    if threading.current_thread() is not threading.main_thread():
        # PR_SET_PDEATHSIG kills a process when the thread that started it ends, and Python
        # handles signals in the main thread.
        return "fit is called in a thread"
    return None


def _debugged() -> bool:
    tracer = sys.gettrace()
    return isinstance(getattr(tracer, "__self__", None), bdb.Bdb) or (
        tracer is not None and "pydevd" in sys.modules
    )


def _is_same_file(path: Path, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except (OSError, ValueError):
        return False
