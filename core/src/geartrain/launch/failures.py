"""Decide which rank failed first, which ranks are late, and how the error names them.

Nothing here starts, waits or ends: a supervisor passes in handles of the ranks that it has started, and a clock.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from geartrain.launch.reports import is_connection, is_timeout
from geartrain.launch.stopped_rank import StoppedRankMonitor


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank failed."""

    rank: int
    #: When, in seconds since the epoch.
    when: float
    #: The error's type and message; without an error, the exit code.
    message: str
    traceback: str = ""
    #: The signal that ended the rank, if it reported no error.
    signal: int | None = None

    @classmethod
    def of(cls, rank: int, when: float, error: BaseException) -> Failure:
        """Return the failure of a rank that raised an error."""
        return cls(rank, when, f"{type(error).__name__}: {error}")

    @classmethod
    def read(cls, rank: int, path: Path) -> Failure | None:
        """Return the failure that a rank reported before teardown; ``None`` if it reported none."""
        try:
            report = json.loads(path.read_text())["message"]
            about = report["extraInfo"]
            when, text = about.get("when", about["timestamp"]), about["py_callstack"]  # without ``when`` it is torch's own ``@record``
            return cls(rank, float(when), report["message"].removesuffix(f"\n{text}"), text)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    @property
    def is_lost_connection(self) -> bool:
        """True if the error says only that another rank has gone, or did not come."""
        return is_connection(self.message)

    def describe(self) -> str:
        if self.signal is not None:
            return f"rank {self.rank} was ended by {signal.Signals(self.signal).name}"
        return f"rank {self.rank} failed: {self.message}" + (f"\n{self.traceback}" if self.traceback else "")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a run failed."""

    first: Failure
    #: Ranks for which ``first`` waited until the strategy's timeout.
    late: Sequence[int] = ()
    #: Ranks that ended with exit code 0 in the middle of the run, which ``first`` lost.
    left: Sequence[int] = ()

    def describe(self) -> str:
        if self.late:
            waited = self.first.describe().partition("\n")[0]
            return f"{_named(self.late)} did not come to a collective within the strategy's timeout (hung or stopped): {waited}"
        if self.left:
            return left_early(self.left)
        return self.first.describe()


def judge(failures: Sequence[Failure], silent: Sequence[int] = (), left: Sequence[int] = ()) -> Verdict | None:
    """Decide which rank is to blame.

    Args:
        failures: of ranks that failed by themselves.
        silent: ranks that had reported no error when the others had failed.
        left: ranks that ended with exit code 0 before the run did.

    Returns:
        ``None`` if no rank failed.
    """
    if not failures:
        return None
    # A lost connection is never the cause: it follows another rank's end, though that may be seen later.
    first = min(failures, key=lambda failure: (failure.is_lost_connection, failure.when))
    if not first.is_lost_connection:
        return Verdict(first)
    if silent and is_timeout(first.message):
        return Verdict(first, late=silent)  # a rank that waited reports a timeout; the late rank reports nothing
    return Verdict(first, left=left)


class RankHandle(Protocol):
    """A rank that a supervisor has started."""

    @property
    def number(self) -> int:
        """The rank."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Return the exit code, negative after a signal; ``None`` while the process runs."""

    def error(self) -> Failure | None:
        """Return the failure that the rank has reported, if any."""


class RankMonitor:
    """Notes how ranks end, until their supervisor ends them.

    Args:
        ranks: those that the supervisor has started.
        stopped: counts how long ranks have been stopped.
        clock: seconds since the epoch.
    """

    def __init__(self, ranks: Sequence[RankHandle], stopped: StoppedRankMonitor, clock: Callable[[], float] = time.time) -> None:
        self._ranks, self._stopped, self._clock = ranks, stopped, clock
        self._codes: dict[int, int] = {}
        #: Failures of ranks that failed by themselves.
        self.failures: list[Failure] = []
        #: Ranks that had reported no error when the supervisor ended them.
        self.silent: list[int] = []
        #: True once the supervisor ends the ranks. Later failures are its own doing and are not noted.
        self.is_ending = False

    def look(self) -> list[Failure]:
        """Note which ranks have ended or have been stopped for too long.

        Returns:
            New failures.
        """
        found = [] if self.is_ending else self._find_stopped()
        for rank in self._running():
            code = rank.poll()
            if code is not None:
                self._codes[rank.number] = code
                if code != 0 and not self.is_ending and not self._has_failed(rank):
                    found.append(self._failure(rank, code))
        self.failures += found
        return found

    def begin_end(self) -> None:
        """Note that the supervisor now ends the ranks. A rank that has reported its error, and is slow to tear down, has failed too."""
        if not self.is_ending:
            self.is_ending = True
            errors = {rank.number: rank.error() for rank in self._running() if not self._has_failed(rank)}
            self.failures += [error for error in errors.values() if error is not None]
            self.silent = [number for number, error in errors.items() if error is None]

    @property
    def running(self) -> list[int]:
        """Ranks that have not ended."""
        return [rank.number for rank in self._running()]

    @property
    def succeeded(self) -> list[int]:
        """Ranks that ended with exit code 0."""
        return [number for number, code in self._codes.items() if code == 0]

    def _running(self) -> list[RankHandle]:
        return [rank for rank in self._ranks if rank.number not in self._codes]

    def _has_failed(self, rank: RankHandle) -> bool:
        return any(failure.rank == rank.number for failure in self.failures)

    def _find_stopped(self) -> list[Failure]:
        numbers = {rank.pid: rank.number for rank in self._running() if not self._has_failed(rank)}
        since = self._clock() - self._stopped.patience
        return [Failure(numbers[pid], since, self._stopped.describe()) for pid in self._stopped.too_long(numbers)]

    def _failure(self, rank: RankHandle, code: int) -> Failure:
        # A rank that a signal ends during teardown has failed by the error that it reported.
        return rank.error() or Failure(rank.number, self._clock(), f"exit code {code}", signal=-code if code < 0 else None)


def left_early(ranks: Sequence[int]) -> str:
    """Return the message for ranks that ended with exit code 0 before the run did."""
    return f"{_named(ranks)} left the program before the run ended (exit code 0, as after os._exit(0))"


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
