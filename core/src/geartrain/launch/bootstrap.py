"""What runs first in a started process: tie its life to its starter's, send its output to its log, become the command.

Run by path with ``python -I -S``; nothing but the standard library, so that it costs 13 ms.

    bootstrap.py STARTER_PID LOG HANGUP COMMAND [ARG ...]

HANGUP is ``ignore`` under nohup, and the command then ignores SIGHUP, too; else ``keep``.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    starter, log, hangup, *command = sys.argv[1:]
    if hangup == "ignore":
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if sys.platform == "linux":
        # Survives exec, not fork: loader workers do not inherit it. It follows the thread that started us: the main one.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(starter):
        sys.exit(f"rank not started: its starter, process {starter}, is gone")
    # Appending: stdout and stderr share the file, and a restarted rank adds to it.
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    os.environ["GEARTRAIN_STARTED_BY"] = str(os.getpid())  # exec keeps the id; what this rank runs has another
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
