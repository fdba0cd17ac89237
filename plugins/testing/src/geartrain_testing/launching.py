"""Programs of several processes, found again by a token in their environment, always cleaned up, and what they leave behind.

Linux's /proc is what knows processes and sockets; see :data:`HAS_PROC`.
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
#: Whether processes can be found by their environment here.
HAS_PROC = Path("/proc/self/environ").exists()
_SHARED_MEMORY = Path("/dev/shm")
#: Addresses of loopback as /proc/net writes them, IPv4 and IPv6.
LOOPBACK = ("0100007F", "0" * 24 + "01000000")
#: Ports that no kernel gives to a program that asks for any port (Linux starts at 32768, others at 49152).
PORTS = range(20000, 32000)
#: Processes of neighbouring numbers try ports 100 apart.
_numbers = itertools.count(os.getpid() * 100)
#: What would make a test's program one of several already, or change what it does.
_CLEARED = (
    *(
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    ),
    *(
        "GEARTRAIN_STARTED_BY",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHELASTIC_ERROR_FILE",
        "PYTEST_CURRENT_TEST",
    ),
    *("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "HOROVOD_RANK", "HOROVOD_SIZE"),
)


def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Poll until ``condition`` holds.

    Returns:
        Its value.

    Raises:
        AssertionError: not within ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.02)
    return value


class Launched:
    """A command and whatever it starts.

    Args:
        command: the program and its arguments.
        folder: where it runs and where its output goes, to ``NAME.out`` and ``NAME.err``.
        environment: variables on top of this process's, less those that would make the program a rank.
        name: of the output files, and of the folder for temporary files.
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
        # A folder of its own for temporary files: what a run leaves there is seen.
        self.temporary = folder / f"{name}.tmp"
        self.temporary.mkdir(exist_ok=True)
        # By a short name: sockets of AF_UNIX, which multiprocessing makes there, have paths of 107 characters at most.
        self._short = Path(tempfile.gettempdir(), f"gt-{self.token[:8]}")
        self._short.symlink_to(self.temporary.absolute(), target_is_directory=True)
        self._shared_before = _shared_memory()
        environ |= {TOKEN: self.token, "TMPDIR": str(self._short), "PYTHONUNBUFFERED": "1"}
        environ["TORCHINDUCTOR_CACHE_DIR"] = str(
            folder / f"{name}.inductor"
        )  # torch's own, which it makes when it is imported
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
        """Note which processes are this run's and which shared memory they have: afterwards nobody could tell."""
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
        """The exit code; shows the output where it does not end."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"still running after {seconds} s\n{self.out}\n{self.err}"
            ) from None

    def succeed(self, seconds: float = 60) -> Launched:
        """Wait for exit code 0; shows the output where it is another."""
        assert self.wait(seconds) == 0, self.out + self.err
        return self

    def processes(self) -> list[int]:
        """Living processes of this run, its first one included."""
        return processes(self.token)

    def left_behind(self, seconds: float = 5) -> list[str]:
        """What is still there after the program ended, given some seconds to go away: processes, shared memory, temporary files.

        Files in /dev/shm count where they are new, no living process has them, and one of this run's had, or its id is in their name:
        other programs leave some there too.
        """
        deadline = time.monotonic() + seconds
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def _left(self) -> list[str]:
        processes = [f"process {pid}: {_command_line(pid)}" for pid in self.processes()]
        new = _shared_memory() - self._shared_before
        mine = {
            path
            for path in new
            if path in self._mapped
            or self._pids & {int(digits) for digits in re.findall(r"\d+", path)}
        }
        living = (
            set().union(
                *(
                    _mapped(int(entry.name))
                    for entry in Path("/proc").iterdir()
                    if entry.name.isdigit()
                )
            )
            if mine
            else set()
        )
        shared = [f"shared memory {path}" for path in sorted(mine - living)]
        files = [
            f"temporary file {path.relative_to(self.temporary)}"
            for path in sorted(self.temporary.rglob("*"))
        ]
        return processes + shared + files

    def kill(self) -> None:
        """End every process of this run."""
        self._ended.set()
        deadline = time.monotonic() + 20
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
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
                ours = f"{TOKEN}={token}".encode() in (entry / "environ").read_bytes().split(b"\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if ours and state not in "ZX":
                found.append(int(entry.name))
    return found


@contextmanager
def launched(
    *arguments: str, folder: Path, name: str = "run", before: Sequence[str] = (), **environment: str
) -> Iterator[Launched]:
    """``python ARGUMENTS``, killed at the end with all that it started; ``before`` goes before it (``ip netns exec NAME``)."""
    run = Launched([*before, sys.executable, *arguments], folder, environment, name)
    try:
        yield run
    finally:
        run.kill()


def listening(pids: Sequence[int]) -> list[str]:
    """Addresses, in /proc/net's hexadecimal, on which these processes listen."""
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
    """Shared memory that a process has mapped or open."""
    try:
        maps, folder = (
            Path(f"/proc/{pid}/maps").read_text(errors="replace"),
            Path(f"/proc/{pid}/fd"),
        )
        handles = [os.readlink(handle) for handle in folder.iterdir()]
    except OSError:
        return set()
    return {
        *re.findall(rf"{_SHARED_MEMORY}/\S+", maps),
        *(path for path in handles if path.startswith(f"{_SHARED_MEMORY}/")),
    }


def _command_line(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
            .strip()
        )
    except OSError:
        return "(gone)"


def free_port() -> int:
    """Return a TCP port of loopback on which nothing listens, another one each time.

    The kernel gives it to no program that asks for any port. Otherwise another test could receive
    it before the launcher under test listens on it.
    """
    for _ in PORTS:
        port = PORTS[next(_numbers) % len(PORTS)]
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(
        f"no port from {PORTS[0]} to {PORTS[-1]} is free. Fix: end the processes that listen there"
    )
