"""The command line that starts another rank of this program: the same one, in the directory where the program started."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from geartrain.errors import UsageError

#: Where the program started, read when geartrain is first imported: relative paths in its command line count from there.
try:
    DIRECTORY = os.getcwd()
except FileNotFoundError:  # it was removed; nothing can be run again there, and nothing else depends on it
    DIRECTORY = os.sep


def command() -> list[str]:
    """Return the command to run again.

    Raises:
        UsageError: there is none to run again, it would not do the same, or its file cannot be found from the start directory.
    """
    reason = reason_not_rerunnable()
    if reason:
        raise UsageError(
            f"other ranks are started by running the same command again, and {reason}. Fix: put the program in a file and run "
            "that, or --strategy ddp_spawn (pip install geartrain-spawn), or --strategy dp (pip install geartrain-dp)"
        )
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None) if getattr(main, "__spec__", None) is None else None  # python -m has a spec
    # A program that runs another script as __main__ does not name that script in its arguments.
    named = [argument for argument in sys.orig_argv[1:] if script is not None and Path(argument).name == Path(script).name]
    if script is not None and named and not any(_is_same_file(Path(DIRECTORY, argument), script) for argument in named):
        raise UsageError(
            f"other ranks are started by running the same command again, and {script} is not found from {DIRECTORY}, the current "
            "directory when geartrain was imported. Fix: import geartrain before os.chdir()"
        )
    return [sys.executable, *sys.orig_argv[1:]]


def _is_same_file(path: Path, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except (OSError, ValueError):
        return False


def reason_not_rerunnable() -> str | None:
    """Return why this program cannot be run again, or ``None`` if it can."""
    main = sys.modules.get("__main__")
    if "ipykernel" in sys.modules:
        return "a notebook has none"
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return "an interactive session has none"
    if "PYTEST_CURRENT_TEST" in os.environ and "_pytest" in sys.modules:  # the variable alone reaches every child of a test
        return "under pytest it would run the tests again"
    if _debugged():
        return "under a debugger each rank would wait for it"
    file = getattr(main, "__file__", None)
    if (file is None and sys.argv[:1] != ["-c"]) or str(file).startswith(("<stdin>", "/dev/", "/proc/")):
        return "a program read from standard input has none"
    if threading.current_thread() is not threading.main_thread():
        # PR_SET_PDEATHSIG fires when the thread that started a process ends, and Python handles signals in the main thread.
        return "fit is called in a thread"
    return None


def _debugged() -> bool:
    import bdb

    tracer = sys.gettrace()
    return isinstance(getattr(tracer, "__self__", None), bdb.Bdb) or (tracer is not None and "pydevd" in sys.modules)
