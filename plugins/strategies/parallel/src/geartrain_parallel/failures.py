"""Failures of ranks, and the decision which rank is to blame. Processes are elsewhere."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of one rank."""

    rank: int
    #: The time, in seconds since the epoch.
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
            text = about["py_callstack"]
            when = about.get("when", about["timestamp"])  # torch's ``@record`` writes no ``when``
            return cls(rank, float(when), report["message"].removesuffix(f"\n{text}"), text)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    @property
    def is_lost_connection(self) -> bool:
        """True if the error only says that another rank has gone or did not come."""
        return is_connection(self.message)

    def describe(self) -> str:
        if self.signal is not None:
            return f"rank {self.rank} {describe_exit(-self.signal)}"
        more = self.traceback
        if "Traceback (" not in more:  # no line of the user: the message again, and notes
            more = more.partition(self.message.partition(": ")[2] or self.message)[2].strip()
        return f"rank {self.rank} failed: {self.message}" + (f"\n{more}" if more else "")


def describe_exit(code: int) -> str:
    """Say how a process has ended.

    Args:
        code: its exit code, negative after a signal.
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:  # of the real-time signals only the first and the last have names
        return f"was ended by signal {-code}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The cause of a run's failure."""

    #: The ranks to blame.
    ranks: Sequence[int]
    message: str
    #: The failure of the rank to blame; ``None`` if it reported none: it was late or left the
    #: program.
    failure: Failure | None = None


def judge(
    failures: Sequence[Failure], silent: Sequence[int] = (), left: Sequence[int] = ()
) -> Verdict | None:
    """Decide which rank is to blame.

    Args:
        failures: failures of ranks that no supervisor ended.
        silent: ranks without a reported error when the others had failed.
        left: ranks that ended with exit code 0 before the run ended.

    Returns:
        ``None`` if no rank failed.
    """
    # A lost connection is never the cause. It follows another rank's end, which may be seen later.
    first = min(
        failures, key=lambda failure: (failure.is_lost_connection, failure.when), default=None
    )
    if first is not None and not first.is_lost_connection:
        return Verdict([first.rank], first.describe(), first)
    if first is not None and silent and is_timeout(first.message):
        # A rank that waited reports a timeout; the late rank reports nothing.
        waited = first.describe().partition("\n")[0]
        return Verdict(
            silent,
            f"{_named(silent)} did not come to a collective within the strategy's timeout "
            f"(hung or stopped): {waited}",
        )
    if left:
        return Verdict(
            left,
            f"{_named(left)} left the program before the run ended "
            "(exit code 0, as after os._exit(0))",
        )
    return None if first is None else Verdict([first.rank], first.describe(), first)


def is_connection(message: str) -> bool:
    """True if an error's message is that of a collective whose peer has gone."""
    return any(
        word in message.lower()
        for word in ("connection", "gloo", "nccl", "peer", "timed out", "socket")
    )


def is_timeout(message: str) -> bool:
    """True if an error's message says that a rank waited for others until a timeout.

    Messages of gloo and of the store match; a loader's timeout does not.
    """
    first = message.partition("\n")[0].lower()
    return re.search("timed out (after .* )?waiting", first) is not None


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
