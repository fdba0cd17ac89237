"""Passes over loaders, counted, and the display of plain lines. rich is not needed here."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

#: Seconds from one line to the next in a long epoch, without a terminal.
SECONDS_A_LINE = 30.0


@dataclass(slots=True)
class Count:
    """Batches of one pass over one loader."""

    title: str
    #: Batches in the pass; ``None`` if unknown.
    total: int | None
    #: Its start in seconds of ``time.monotonic``; pauses move it to a later time.
    began: float
    #: The unit of the rate: ``"steps"`` or ``"batches"``.
    unit: str = "batches"
    done: int = 0
    #: Optimizer steps, if the rate counts them.
    steps: int = 0
    #: The start of a pause, as for validation inside an epoch.
    paused: float | None = None

    def seconds(self) -> float:
        """Return the seconds so far, without pauses."""
        return max((time.monotonic() if self.paused is None else self.paused) - self.began, 1e-9)

    def resume(self) -> None:
        """End a pause."""
        if self.paused is not None:
            self.began, self.paused = self.began + time.monotonic() - self.paused, None

    def rate(self) -> str:
        """Return steps or batches per second since the start."""
        return (
            f"{(self.steps if self.unit == 'steps' else self.done) / self.seconds():.1f} {self.unit}/s"
            if self.done
            else ""
        )

    def batches(self) -> str:
        return f"{self.done}/{self.total}" if self.total is not None else str(self.done)

    def left(self) -> str:
        """Return the time that is left at this rate; empty if it is unknown or nothing is left."""
        if not self.total or not 0 < self.done < self.total:
            return ""
        return f"{timedelta(seconds=round(self.seconds() / self.done * (self.total - self.done)))} left"


def metrics_text(metrics: dict[str, float]) -> str:
    return " ".join(f"{name}={value:.4g}" for name, value in metrics.items())


class Lines:
    """A plain line now and then, so that a log file shows life."""

    #: Seconds until it should show again.
    pause = SECONDS_A_LINE

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
        print(", ".join(filter(None, facts)), file=sys.stderr, flush=True)

    def stop(self) -> None:
        pass
