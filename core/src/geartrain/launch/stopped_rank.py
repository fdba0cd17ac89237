"""Ranks that were stopped (SIGSTOP) and do not continue.

A stopped process has not failed, so the others wait for it until their collectives time out, after half an hour by default.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path


class StoppedRankMonitor:
    """Counts how long processes have been stopped.

    Only time in which this process runs counts, so a job that is suspended and resumed as a whole was not stopped. Nor is a rank that a
    debugger holds.

    Args:
        patience: seconds that a rank may be stopped while the others run.
        clock: counts seconds.
    """

    def __init__(self, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.patience, self._clock = patience, clock
        #: Seconds between two looks.
        self.period = min(2.0, patience / 4)
        self._seconds: dict[int, float] = {}
        self._looked = clock()

    def too_long(self, pids: Iterable[int]) -> list[int]:
        """Return the processes that have been stopped for ``patience``; call it every ``period`` or more often."""
        now = self._clock()
        passed, self._looked = min(now - self._looked, 2 * self.period), now
        self._seconds = {pid: self._seconds.get(pid, -passed) + passed for pid in pids if is_stopped(pid)}
        return [pid for pid, seconds in self._seconds.items() if seconds >= self.patience]

    def describe(self) -> str:
        """Return the message for such a rank."""
        seconds = f"{self.patience:g} s"
        return f"it has been stopped (SIGSTOP) for {seconds}, and the others wait for it. Fix: suspend all ranks of a run, or none"


def is_stopped(pid: int) -> bool:
    """True if a process is stopped: until it continues it handles no signal but SIGKILL."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"  # a debugger's is a small t
    except OSError:
        return False  # it has ended; or this system has no /proc, and a stopped rank is a late one
