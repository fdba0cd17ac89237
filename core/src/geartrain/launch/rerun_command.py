"""Check if this program can be started again as another rank; know its start directory."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress


class StartCommand:
    """The command that started this program. A launcher may run it again for each other rank."""

    def __init__(self) -> None:
        #: The directory at the first import of geartrain: the command's relative paths are from it.
        self.directory = os.sep
        with suppress(FileNotFoundError):  # it was removed, so nothing can be run again there
            self.directory = os.getcwd()

    def reason_not_rerunnable(self) -> str | None:
        """Return why this program cannot be run again, or ``None`` if it can."""
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


#: The value for this program.
START_COMMAND = StartCommand()


def _debugged() -> bool:
    import bdb

    tracer = sys.gettrace()
    return isinstance(getattr(tracer, "__self__", None), bdb.Bdb) or (
        tracer is not None and "pydevd" in sys.modules
    )
