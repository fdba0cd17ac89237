"""Watch the ranks that a process has started, decide which failed first, and end the others."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Protocol

from geartrain_parallel.failures import Failure, Verdict, judge
from geartrain_parallel.patience import Patience

#: Seconds between two SIGTERMs to a rank that has not reported an error.
_AGAIN = 1.0
#: The number of last lines of a rank's output to show.
_LINES = 40


class RankHandle(Protocol):
    """A rank that a supervisor watches; the strategy that starts ranks implements it."""

    @property
    def number(self) -> int:
        """The rank."""

    @property
    def pid(self) -> int: ...

    @property
    def sentinel(self) -> int:
        """A file descriptor that becomes readable when the process ends."""

    def poll(self) -> int | None:
        """Return the exit code, negative after a signal; ``None`` while the process runs."""

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""

    def error(self) -> Failure | None:
        """Return the failure that the rank has reported, if any."""


class Supervisor:
    """Watches the ranks of one node.

    Args:
        ranks: the started ranks; the list may grow until the first call of a method.
        logs: the folder of ``rank-N.log``.
        patience: how long ranks may take.
        clock: returns seconds since the epoch.
    """

    def __init__(
        self,
        ranks: Sequence[RankHandle],
        logs: Path,
        patience: Patience,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._ranks, self._logs, self._patience, self._clock = ranks, logs, patience, clock
        #: The most seconds between two checks.
        self.period = min(2.0, patience.stopped / 4)
        self._looked = clock()
        #: Rank -> seconds for which it has been stopped.
        self._stopped: dict[int, float] = {}
        self._codes: dict[int, int] = {}
        self._lock = threading.Lock()
        #: Failures of ranks that this supervisor did not end.
        self.failures: list[Failure] = []
        #: Ranks that had reported no error when this supervisor ended them.
        self.silent: list[int] = []
        #: True once this supervisor ends the ranks. It causes later failures, and ignores them.
        self.is_ending = False

    # --- watching ---------------------------------------------------------------------------------

    def watch(self, *wake: int) -> bool:
        """Wait until a rank fails or a descriptor of ``wake`` is readable.

        Without descriptors, wait until a rank fails or all ranks have ended.

        Returns:
            True if a rank has failed.
        """
        ready: list[int] = []
        while True:
            self.look()
            if self.failures or not set(wake).isdisjoint(ready) or not (wake or self.running):
                return bool(self.failures)
            ready = self.wait(self.period, *wake)

    def wait(self, seconds: float, *wake: int) -> list[int]:
        """Wait until a rank ends or a descriptor of ``wake`` is readable; return readable ones."""
        sentinels = [rank.sentinel for rank in self._running()]
        return connection.wait([*wake, *sentinels], seconds)  # type: ignore[return-value]

    def look(self) -> None:
        """Check which ranks have ended, have failed, or have been stopped for too long."""
        with self._lock:
            if not self.is_ending:
                self._find_stopped()
            for rank in self._running():
                code = rank.poll()
                if code is not None:
                    self._codes[rank.number] = code
                    if code != 0 and not self.is_ending and not self._has_failed(rank):
                        self.failures.append(self._failure(rank, code))

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

    def _failure(self, rank: RankHandle, code: int) -> Failure:
        # If a signal ends a rank during teardown, the error that it reported is the failure.
        return rank.error() or Failure(
            rank.number, self._clock(), f"exit code {code}", signal=-code if code < 0 else None
        )

    def _find_stopped(self) -> None:
        """Find ranks that were stopped (SIGSTOP): others would wait for them until a timeout.

        Only time in which this process runs counts, so that a whole job may be suspended and
        resumed.
        """
        limit, current = self._patience.stopped, self._clock()
        passed, self._looked = min(current - self._looked, 2 * self.period), current
        stopped = [rank for rank in self._running() if is_stopped(rank.pid)]
        self._stopped = {
            rank.number: self._stopped.get(rank.number, -passed) + passed for rank in stopped
        }
        message = (
            f"it has been stopped (SIGSTOP) for {limit:g} s, and the others wait for it. "
            "Fix: suspend all ranks of a run, or none"
        )
        late = [
            rank
            for rank in stopped
            if self._stopped[rank.number] >= limit and not self._has_failed(rank)
        ]
        self.failures += [Failure(rank.number, current - limit, message) for rank in late]

    # --- ending -----------------------------------------------------------------------------------

    def unwind(self) -> None:
        """Wait for ranks to end after a failure, which closes connections; then end the rest."""
        # A rank that has failed and still runs is stopped: others wait for it.
        self._signal(signal.SIGKILL, [rank for rank in self._running() if self._has_failed(rank)])
        self._wait_until_ended(self._patience.unwind)
        self.end()

    def end(self) -> None:
        """End every rank: SIGTERM, some seconds to tear down, SIGKILL."""
        self.begin_end()
        # A stopped process handles no other signal.
        self._signal(signal.SIGKILL, [rank for rank in self._running() if is_stopped(rank.pid)])
        self._wait_until_ended(self._patience.grace, self._ask_to_end)
        self._signal(signal.SIGKILL, self._running())
        # With a limit, because a process may be stuck in a device's driver.
        self._wait_until_ended(self._patience.grace)

    def begin_end(self) -> None:
        """Mark that this supervisor now ends the ranks.

        A rank that has reported an error and is still in teardown has failed, too.
        """
        self.look()
        with self._lock:
            if not self.is_ending:
                self.is_ending = True
                errors = {
                    rank.number: rank.error()
                    for rank in self._running()
                    if not self._has_failed(rank)
                }
                self.failures += [error for error in errors.values() if error is not None]
                self.silent = [number for number, error in errors.items() if error is None]

    def _ask_to_end(self) -> None:
        # Repeatedly: a terminal sends Ctrl-C to ranks, too. If SIGTERM follows at once, the kernel
        # may deliver both to another thread of a rank. The main thread, where Python handles
        # signals, then continues to wait.
        self._signal(signal.SIGTERM, [rank for rank in self._running() if rank.error() is None])

    def _signal(self, number: int, ranks: Sequence[RankHandle]) -> None:
        for rank in ranks:
            rank.signal(number)

    def _wait_until_ended(
        self, seconds: float, every_second: Callable[[], None] = lambda: None
    ) -> None:
        deadline = time.monotonic() + seconds
        self.look()
        while self._running() and (remaining := deadline - time.monotonic()) > 0:
            every_second()
            self.wait(min(remaining, _AGAIN))
            self.look()

    # --- afterwards -------------------------------------------------------------------------------

    def judge(
        self, own: Sequence[Failure] = (), silent: Sequence[int] = (), left: Sequence[int] = ()
    ) -> Verdict | None:
        """Decide which rank is to blame; see :func:`geartrain_parallel.failures.judge`.

        Args:
            own: the failure of the supervising process, if that is a rank, too.
            silent: ranks that were late if all watched ranks reported a timeout.
            left: ranks that ended with exit code 0 before the run ended.
        """
        return judge([*self.failures, *own], self.silent or silent, left)

    def show_log(self, rank: int) -> str:
        """Print the end of a rank's output; return a message's last line, with the log's path."""
        path = self._logs / f"rank-{rank}.log"
        if not path.exists():
            return ""
        if lines := path.read_text(errors="replace").splitlines()[-_LINES:]:
            print(
                f"--- the end of rank {rank}'s output ---",
                *lines,
                f"--- {path} ---",
                sep="\n",
                file=sys.stderr,
            )
        return f"\n(its output: {path})"


def is_stopped(pid: int) -> bool:
    """True if a process is stopped, but not by a debugger; it then handles only SIGKILL."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False  # it has ended; or the system has no /proc, and stopped ranks time out
    return state == "T"  # "t" under a debugger
