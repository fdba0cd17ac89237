"""Programs that start with torch imported: a process that has imported torch forks them.

Tests run programs as separate processes. Most of their time is the import of torch: two seconds, or
four with the imports of optimizers and options. :class:`Warm` starts one process that imports all
of this once. :meth:`Warm.script` writes a command that makes this process fork. The command behaves
like the program: it has its standard streams, working folder, variables and exit code, and if the
command ends, the program ends. There are two differences: a signal to the command kills the
program, and ``sys.modules`` has more modules.

Tests of imports, signals or parent processes need a program that is not forked. This file uses only
the standard library, because it runs in environments of tests.
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

#: torch.optim imports torch._dynamo when the first optimizer is created.
IMPORTED = (
    "torch",
    "torch.utils.data",
    "torch.distributed",
    "torch._dynamo",
    "jsonargparse",
    "rich.table",
    "rich.progress",
)
#: Without pidfd_open a process and a socket cannot be waited for together.
AVAILABLE = hasattr(os, "pidfd_open")


class Warm:
    """The process that forks.

    It ends when this process ends or drops its last reference.

    Args:
        python: the interpreter of the programs.
        folder: a folder for the socket; its path must be short.
        env: variables of the process; each program has the variables of its command.
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
        """Write a command to ``path`` and return the path.

        Args:
            program: the file that the command runs; ``None``: the command is a ``python`` that runs
                the file in its arguments.
            python: the interpreter; its environment must have the packages of this one, and may
                have more.
        """
        python = str(python or self._python)
        itself, client = (
            shlex.join(words) for words in ([python], [python, "-IS", __file__, self._socket])
        )
        choose = "" if program is None else f'set -- {shlex.quote(str(program))} "$@"\n'
        # Python itself runs `python -c`. It also runs ranks: GEARTRAIN_STARTED_BY has the process
        # id, which a fork would change.
        direct = f'[ -f "$1" ] && [ -z "$GEARTRAIN_STARTED_BY" ] || exec {itself} "$@"\n'
        path.write_text(f'#!/bin/sh\n{choose}{direct}exec {client} "$@"\n', encoding="utf-8")
        path.chmod(0o755)
        return path

    def end(self):
        """End the process, the programs and their child processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


# --- the command ---------------------------------------------------------------------------------


def ask(path, argv):
    """Request a program, and end with its exit code or signal."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        # Not sys.prefix, which is the environment's only if site is imported.
        prefix = str(Path(sys.executable).parents[1])
        request = json.dumps([argv, os.getcwd(), dict(os.environ), prefix]) + "\n"
        sent = socket.send_fds(connection, [request.encode()], [0, 1, 2])
        connection.sendall(request.encode()[sent:])
        answer = connection.makefile().readline()
    status = int(answer) if answer else 1 << 8
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    sys.exit(os.waitstatus_to_exitcode(status))


# --- the process that forks ----------------------------------------------------------------------


def serve(path):
    """Fork for each request, until the standard input ends.

    Returns:
        In a new program only: its arguments and the prefix of its environment.
    """
    for name in IMPORTED:
        import_module(name)
    gc.collect()
    gc.freeze()  # so that garbage collection in a program does not copy the shared memory
    listener = socket.socket(socket.AF_UNIX)
    Path(path).unlink(missing_ok=True)  # of a process that was killed
    listener.bind(path)
    listener.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for the parents of programs
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
    """Start the program and send its exit status to the command. Returns only in the program."""
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
    """Restart coverage in a fork if tests/tools/mutations.py measures.

    The environment of the fork names the test that requested it.
    """
    coverage = sys.modules.get("coverage")
    if coverage is not None and "COVERAGE_PROCESS_START" in os.environ:
        coverage.Coverage.current().stop()
        coverage.process_startup(force=True)


def _run(argv, prefix):
    """Run a file like ``PREFIX/bin/python FILE``, and end."""
    sys.prefix = sys.exec_prefix = prefix
    sys.executable = f"{prefix}/bin/python3"  # not the command of script()
    # Packages that only this environment has, or that were installed after the start.
    site.addsitedir(sysconfig.get_path("purelib", vars={"base": prefix}))
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
    # End like the interpreter, but without the destruction of all modules, which copies all memory
    # and takes half a second.
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
