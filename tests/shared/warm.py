"""Programs that begin with torch imported: a process that has imported it forks for each.

A program of a test is a process of its own, and most of what it takes is the import of torch: two seconds, or four with what optimizers
and options import. :class:`Warm` starts one process that imports them once. :meth:`Warm.script` writes a command that has it fork, and
that is otherwise like the program itself: it has the standard streams, the working folder, the variables and the exit status; if it ends,
so does the program. What differs: a signal ends the command without a word to the program, and ``sys.modules`` has more in it.

A test of imports, of signals or of who started whom needs a program from scratch. This file uses the standard library alone: it runs
inside environments of tests.
"""

import atexit
import contextlib
import gc
import json
import os
import select
import shlex
import signal
import site
import socket
import subprocess
import sys
import sysconfig
import threading
import traceback
import types
from importlib import import_module
from pathlib import Path

#: torch._dynamo is what torch.optim imports when the first optimizer is made.
IMPORTED = (
    "torch",
    "torch.utils.data",
    "torch.distributed",
    "torch._dynamo",
    "jsonargparse",
    "rich.table",
    "rich.progress",
)
#: Elsewhere a process cannot be waited for together with a socket.
AVAILABLE = hasattr(os, "pidfd_open")


class Warm:
    """Start the process that forks.

    It ends with this process, or when nothing refers to it any more.

    Args:
        python: the interpreter of the programs.
        folder: for its socket, whose path must be short.
        env: its variables; each program has those of its command.
    """

    def __init__(self, python, folder, env=None):
        self._python, self._socket = python, str(Path(folder, "socket"))
        command = [str(python), __file__, "--serve", self._socket]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, start_new_session=True
        )
        if self._process.stdout.readline() != b"ready\n":
            raise RuntimeError("the process that forks did not start")

    def script(self, path, program=None, python=None):
        """Write a command to ``path``. It runs ``program``, or is a ``python`` that runs the file that it is given.

        Its interpreter is ``python``, which may be one of another environment that has the same packages and more.
        """
        python = str(python or self._python)
        itself, client = (
            shlex.join(words) for words in ([python], [python, "-IS", __file__, self._socket])
        )
        choose = "" if program is None else f'set -- {shlex.quote(str(program))} "$@"\n'
        # Python itself runs `python -c`. It runs ranks too: GEARTRAIN_STARTED_BY is the process id, which a fork would change.
        whole = f'[ -f "$1" ] && [ -z "$GEARTRAIN_STARTED_BY" ] || exec {itself} "$@"\nexec {client} "$@"\n'
        path.write_text(f"#!/bin/sh\n{choose}{whole}", encoding="utf-8")
        path.chmod(0o755)
        return path

    def end(self):
        """End it, the programs, and what those have started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


# --- the command ---------------------------------------------------------------------------------------------------------


def ask(path, argv):
    """Have a program started, and end as it does."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        prefix = str(
            Path(sys.executable).parents[1]
        )  # sys.prefix is the environment's only if site is imported
        request = json.dumps([argv, os.getcwd(), dict(os.environ), prefix]) + "\n"
        sent = socket.send_fds(connection, [request.encode()], [0, 1, 2])
        connection.sendall(request.encode()[sent:])
        answer = connection.makefile().readline()
    status = int(answer) if answer else 1 << 8
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    sys.exit(os.waitstatus_to_exitcode(status))


# --- the process that forks ----------------------------------------------------------------------------------------------


def serve(path):
    """Fork for each who asks. Returns in the new program, with what it was asked to run; otherwise ends with its standard input."""
    for name in IMPORTED:
        import_module(name)
    gc.collect()
    gc.freeze()  # a program's collections leave alone what it shares with this process
    listener = socket.socket(socket.AF_UNIX)
    Path(path).unlink(missing_ok=True)  # of one that was killed
    listener.bind(path)
    listener.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([listener, 0], [], [])
        if 0 in ready:
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return _keep(connection)
        connection.close()


def _keep(connection):
    """Start the program and tell the command how it ended. Returns in the program alone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    text, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    while not text.endswith(b"\n"):
        text += connection.recv(1 << 20)
    argv, folder, env, prefix = json.loads(text)
    program = os.fork()
    if program == 0:
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(env)
        count_for_test()
        return argv, prefix
    handle = os.pidfd_open(program)
    ready, _, _ = select.select([handle, connection], [], [])
    if handle not in ready:  # the command has ended
        os.kill(program, signal.SIGKILL)
    _, status = os.waitpid(program, 0)
    with contextlib.suppress(OSError):
        connection.sendall(f"{status}\n".encode())
    os._exit(0)


def count_for_test():
    """Restart coverage in a fork, if tests/mutations.py measures: the variables now name the test that asked for the fork."""
    coverage = sys.modules.get("coverage")
    if coverage is not None and "COVERAGE_PROCESS_START" in os.environ:
        coverage.Coverage.current().stop()
        coverage.process_startup(force=True)


def _run(argv, prefix):
    """Run a file as ``PREFIX/bin/python FILE`` does, and end."""
    sys.prefix = sys.exec_prefix = prefix
    sys.executable = f"{prefix}/bin/python3"  # not the command of script()
    site.addsitedir(
        sysconfig.get_path("purelib", vars={"base": prefix})
    )  # what the environment has more, or has been installed since
    sys.argv[:] = argv
    sys.orig_argv[:] = [sys.executable, *argv]
    sys.path[0] = str(Path(argv[0]).resolve().parent)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__, main.__builtins__ = argv[0], __builtins__
    try:
        exec(compile(Path(argv[0]).read_text(encoding="utf-8"), argv[0], "exec"), vars(main))
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    # As the interpreter ends, but without its taking apart every module, which takes a copy of all memory and half a second.
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        _run(*serve(sys.argv[2]))
    else:
        ask(sys.argv[1], sys.argv[2:])
