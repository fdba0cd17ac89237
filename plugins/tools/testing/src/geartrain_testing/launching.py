"""Start programs of several processes, end all of them, and find leftovers.

A token in their environment identifies the processes. This needs Linux's /proc: see
:data:`HAS_PROC`.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

TOKEN = "GEARTRAIN_TEST_TOKEN"
#: True if /proc exists, so that processes can be found by their environment.
HAS_PROC = Path("/proc/self/environ").exists()
_SHARED_MEMORY = Path("/dev/shm")
#: Addresses of loopback as /proc/net writes them, IPv4 and IPv6.
LOOPBACK = ("0100007F", "0" * 24 + "01000000")
#: Ports below those that kernels assign themselves (Linux from 32768, others from 49152).
PORTS = range(20000, 32000)
#: Processes with neighbouring ids try ports 100 apart.
_numbers = itertools.count(os.getpid() * 100)
#: Variables that would make a test's program a rank, or change its behaviour.
_CLEARED = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GEARTRAIN_STARTED_BY",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
    "PYTEST_CURRENT_TEST",
    "GLOO_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
)


def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Poll until ``condition`` holds.

    Returns:
        The value of ``condition()``.

    Raises:
        AssertionError: the condition does not hold within ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.02)
    return value


class Launched:
    """A running command and all processes that it starts.

    Args:
        command: the program and its arguments.
        folder: the working directory; output goes to the files ``NAME.out`` and ``NAME.err`` in it.
        environment: variables to add to this process's environment. Variables that would make the
            program a rank are removed first.
        name: the name of the output files and of the folder for temporary files.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str] | None = None,
        name: str = "run",
    ) -> None:
        self.command, self.folder = list(command), folder
        self.token = uuid.uuid4().hex
        self._out, self._err = folder / f"{name}.out", folder / f"{name}.err"
        environ = {key: value for key, value in os.environ.items() if key not in _CLEARED}
        # A separate folder for temporary files, so that leftovers can be found.
        self.temporary = folder / f"{name}.tmp"
        self.temporary.mkdir(exist_ok=True)
        # multiprocessing makes AF_UNIX sockets there, whose paths have at most 107 characters:
        # a link gives the folder a short name.
        self._short = Path(tempfile.gettempdir(), f"gt-{self.token[:8]}")
        self._short.symlink_to(self.temporary.absolute(), target_is_directory=True)
        self._shared_before = _shared_memory()
        environ |= {TOKEN: self.token, "TMPDIR": str(self._short), "PYTHONUNBUFFERED": "1"}
        # torch makes its cache folder on import, otherwise among the temporary files.
        environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / f"{name}.inductor")
        environ |= environment or {}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                list(command),
                cwd=folder,
                env=environ,
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._ended = threading.Event()
        self._pids: set[int] = {self.process.pid}
        self._mapped: set[str] = set()
        if HAS_PROC:
            threading.Thread(target=self._look, name="launched-look", daemon=True).start()

    def _look(self) -> None:
        """Record this run's processes and their shared memory while they are alive."""
        while not self._ended.wait(0.3):
            for pid in self.processes():
                self._pids.add(pid)
                self._mapped |= _mapped(pid)

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    def wait(self, seconds: float = 60) -> int:
        """Wait for the end and return the exit code; fail with the output after ``seconds``."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"still running after {seconds} s\n{self.out}\n{self.err}"
            ) from None

    def succeed(self, seconds: float = 60) -> Launched:
        """Wait for exit code 0; fail with the output if it is another."""
        assert self.wait(seconds) == 0, self.out + self.err
        return self

    def processes(self) -> list[int]:
        """Return the living processes of this run, including its first one."""
        return processes(self.token)

    def left_behind(self, seconds: float = 5) -> list[str]:
        """Return leftovers of the ended program: processes, shared memory, temporary files.

        They have some seconds to disappear. Other programs leave files in /dev/shm, too. A file
        counts if it is new, no living process has it open, and a process of this run had it open or
        has its id in the file's name.
        """
        deadline = time.monotonic() + seconds
        while (remaining := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return remaining

    def _left(self) -> list[str]:
        processes = [f"process {pid}: {_command_line(pid)}" for pid in self.processes()]
        new = _shared_memory() - self._shared_before
        variables = {
            path
            for path in new
            if path in self._mapped
            or self._pids & {int(digits) for digits in re.findall(r"\d+", path)}
        }
        living: set[str] = set()
        if variables:
            ids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
            living = living.union(*map(_mapped, ids))
        shared = [f"shared memory {path}" for path in sorted(variables - living)]
        files = [
            f"temporary file {path.relative_to(self.temporary)}"
            for path in sorted(self.temporary.rglob("*"))
        ]
        return processes + shared + files

    def kill(self) -> None:
        """End every process of this run."""
        self._ended.set()
        deadline = time.monotonic() + 20
        while (remaining := self.processes()) and time.monotonic() < deadline:
            for pid in remaining:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.02)
        self.process.wait(5)
        self._short.unlink(missing_ok=True)


def processes(token: str) -> list[int]:
    """Return the living processes that have the token of a run in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                is_marked = f"{TOKEN}={token}".encode() in (entry / "environ").read_bytes().split(
                    b"\0"
                )
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if is_marked and state not in "ZX":
                found.append(int(entry.name))
    return found


@contextmanager
def launched(
    *arguments: str, folder: Path, name: str = "run", before: Sequence[str] = (), **environment: str
) -> Iterator[Launched]:
    """Run ``python ARGUMENTS``, and kill it and all its processes at the end.

    Args:
        arguments: of the Python interpreter.
        folder: the working directory, which also gets the output.
        name: the name of the output files.
        before: a command to put before ``python``: ``ip netns exec NAME``.
        environment: variables to add.
    """
    run = Launched([*before, sys.executable, *arguments], folder, environment, name)
    try:
        yield run
    finally:
        run.kill()


def listening(pids: Sequence[int]) -> list[str]:
    """Return the addresses, in /proc/net's hexadecimal, on which these processes listen."""
    inodes = set()
    for pid in pids:
        try:
            inodes |= {
                os.readlink(f"/proc/{pid}/fd/{handle}") for handle in os.listdir(f"/proc/{pid}/fd")
            }
        except OSError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        path = Path("/proc/net") / table
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            columns = line.split()
            if columns[3] == "0A" and f"socket:[{columns[9]}]" in inodes:
                found.append(columns[1].partition(":")[0])
    return found


def _shared_memory() -> set[str]:
    return set(map(str, _SHARED_MEMORY.iterdir())) if _SHARED_MEMORY.is_dir() else set()


def _mapped(pid: int) -> set[str]:
    """Return the shared memory that a process has mapped or open."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        handles = [os.readlink(handle) for handle in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return set()
    return {
        *re.findall(rf"{_SHARED_MEMORY}/\S+", maps),
        *(path for path in handles if path.startswith(f"{_SHARED_MEMORY}/")),
    }


def _command_line(pid: int) -> str:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        return line.decode(errors="replace").strip()
    except OSError:
        return "(gone)"


def free_port() -> int:
    """Return a TCP port of loopback on which nothing listens, a different one each time.

    Kernels do not assign these ports themselves. Otherwise another test could get the port before
    the launcher under test listens on it.
    """
    for _ in PORTS:
        port = PORTS[next(_numbers) % len(PORTS)]
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(
        f"no port from {PORTS[0]} to {PORTS[-1]} is free. Fix: end the processes that listen there"
    )
