"""Progress counts of loaders, and their display as plain lines. This module does not need rich."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

#: Seconds between two lines in a long epoch without a terminal.
SECONDS_A_LINE = 30.0


@dataclass(slots=True)
class Count:
    """Batches of one pass over one loader."""

    title: str
    #: Batches in the pass; ``None`` if unknown.
    total: int | None
    #: The start, in seconds of ``time.monotonic``; a pause moves it forward.
    began: float
    #: The unit of the rate: ``"steps"`` or ``"batches"``.
    unit: str = "batches"
    done: int = 0
    #: Optimizer steps, if the rate counts them.
    steps: int = 0
    #: The start of a pause, for example validation inside an epoch.
    paused: float | None = None

    def seconds(self) -> float:
        """Return the seconds since the start, without pauses."""
        return max((time.monotonic() if self.paused is None else self.paused) - self.began, 1e-9)

    def resume(self) -> None:
        """End a pause."""
        if self.paused is not None:
            self.began, self.paused = self.began + time.monotonic() - self.paused, None

    def rate(self) -> str:
        """Return steps or batches per second since the start."""
        if not self.done:
            return ""
        done = self.steps if self.unit == "steps" else self.done
        return f"{done / self.seconds():.1f} {self.unit}/s"

    def batches(self) -> str:
        return f"{self.done}/{self.total}" if self.total is not None else str(self.done)

    def left(self) -> str:
        """Return the time left at this rate; empty if it is unknown or the pass is done."""
        if not self.total or not 0 < self.done < self.total:
            return ""
        seconds = self.seconds() / self.done * (self.total - self.done)
        return f"{timedelta(seconds=round(seconds))} left"


def metrics_text(metrics: dict[str, float]) -> str:
    return " ".join(f"{name}={value:.4g}" for name, value in metrics.items())


class Lines:
    """Print a plain line at most every 30 seconds, so that a log file shows progress."""

    #: Seconds until the next call of ``show``.
    pause = SECONDS_A_LINE

    def __init__(self) -> None:
        self._said = -math.inf

    def show(self, counts: Sequence[Count], metrics: dict[str, float]) -> None:
        count = counts[-1]
        title = ", ".join(count.title for count in counts)
        self.say(
            [
                f"{title}: {count.batches()} batches",
                count.rate(),
                count.left(),
                metrics_text(metrics),
            ]
        )

    def say(self, facts: Sequence[str]) -> None:
        """Print one line, unless the newest line is younger than 30 seconds."""
        if time.monotonic() - self._said < SECONDS_A_LINE:
            return
        self._said = time.monotonic()
        print(", ".join(filter(None, facts)), file=sys.stderr, flush=True)

    def stop(self) -> None:
        pass
