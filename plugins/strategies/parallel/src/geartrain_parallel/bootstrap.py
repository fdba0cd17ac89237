"""Prepare a started process: die with the starter, write output to a log, become the command.

It is run by path with ``python -I -S``, and uses only the standard library, so that it takes 13 ms.

    bootstrap.py STARTER_PID LOG COMMAND [ARG ...]
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
# Loaded before a fork, because a forked child must not load libraries.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def command(log: object, program: list[str]) -> list[str]:
    """Return the command that runs a program as a child of this process and logs its output.

    The child ignores the signals that this process ignores, as SIGHUP under nohup.
    """
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(log), *program]


def die_with_parent() -> None:
    """Make the kernel kill this process when the thread that started it ends.

    This survives exec, not fork.
    """
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def write_output_to(log: str | os.PathLike[str]) -> None:
    """Append the output of this process and its libraries to a file; a restarted rank, too."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def main() -> None:
    starter, log, *program = sys.argv[1:]
    die_with_parent()
    if os.getppid() != int(starter):
        sys.exit(f"rank not started: its starter, process {starter}, is gone")
    write_output_to(log)
    # exec keeps the process id. A program that this rank starts has another one.
    os.environ["GEARTRAIN_STARTED_BY"] = str(os.getpid())
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
