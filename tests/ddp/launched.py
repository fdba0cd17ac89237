"""Runs of several processes, found again by a token in their environment and always cleaned up."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TOKEN = "GEARTRAIN_TEST_TOKEN"
HERE = Path(__file__).parent
#: What would make a test's program one of several already, or change what it does.
_CLEARED = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("GEARTRAIN_STARTED_BY", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "PYTEST_CURRENT_TEST"),
    *("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"),
)


def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Poll until ``condition`` holds; its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.02)
    return value


class Launched:
    """A command and whatever it starts."""

    def __init__(self, command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None, name: str = "run") -> None:
        self.token = uuid.uuid4().hex
        self._out, self._err = folder / f"{name}.out", folder / f"{name}.err"
        environ = {key: value for key, value in os.environ.items() if key not in _CLEARED}
        # A folder of its own for temporary files: what a run leaves there is seen.
        self.temporary = folder / f"{name}.tmp"
        self.temporary.mkdir(exist_ok=True)
        environ |= {TOKEN: self.token, "TMPDIR": str(self.temporary), "PYTHONUNBUFFERED": "1", **(environment or {})}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                list(command), cwd=folder, env=environ, stdout=out, stderr=err, stdin=subprocess.DEVNULL, start_new_session=True
            )

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
            raise AssertionError(f"still running after {seconds} s\n{self.out}\n{self.err}") from None

    def succeed(self, seconds: float = 60) -> "Launched":
        assert self.wait(seconds) == 0, self.out + self.err
        return self

    def processes(self) -> list[int]:
        """Living processes of this run, its first one included."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    ours = f"{TOKEN}={self.token}".encode() in (entry / "environ").read_bytes().split(b"\0")
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                except OSError:
                    continue
                if ours and state not in "ZX":
                    found.append(int(entry.name))
        return found

    def kill(self) -> None:
        deadline = time.monotonic() + 20
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.02)
        self.process.wait(5)


@contextmanager
def launched(*arguments: str, folder: Path, name: str = "run", before: Sequence[str] = (), **environment: str) -> Iterator[Launched]:
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
            inodes |= {os.readlink(f"/proc/{pid}/fd/{handle}") for handle in os.listdir(f"/proc/{pid}/fd")}
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
