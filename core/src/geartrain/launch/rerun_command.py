"""Find out if this program can be started again as another rank, and in which directory it started."""

from __future__ import annotations

import os
import sys
import threading

#: Where the program started, read when geartrain is first imported: relative paths in its command line count from there.
try:
    START_DIRECTORY = os.getcwd()
except (
    FileNotFoundError
):  # it was removed; nothing can be run again there, and nothing else depends on it
    START_DIRECTORY = os.sep


def reason_not_rerunnable() -> str | None:
    """Return why this program cannot be run again, or ``None`` if it can."""
    main = sys.modules.get("__main__")
    if "ipykernel" in sys.modules:
        return "a notebook has none"
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return "an interactive session has none"
    if (
        "PYTEST_CURRENT_TEST" in os.environ and "_pytest" in sys.modules
    ):  # the variable alone reaches every child of a test
        return "under pytest it would run the tests again"
    if _debugged():
        return "under a debugger each rank would wait for it"
    file = getattr(main, "__file__", None)
    if (file is None and sys.argv[:1] != ["-c"]) or str(file).startswith(
        ("<stdin>", "/dev/", "/proc/")
    ):
        return "a program read from standard input has none"
    if threading.current_thread() is not threading.main_thread():
        # PR_SET_PDEATHSIG fires when the thread that started a process ends, and Python handles signals in the main thread.
        return "fit is called in a thread"
    return None


def _debugged() -> bool:
    import bdb

    tracer = sys.gettrace()
    return isinstance(getattr(tracer, "__self__", None), bdb.Bdb) or (
        tracer is not None and "pydevd" in sys.modules
    )
