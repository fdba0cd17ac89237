"""Progress counts of loaders, and their display as plain lines. This module does not need rich."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

#: Seconds between two lines of a long epoch without a terminal.
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


def metrics_text(metrics: Mapping[str, Any]) -> str:
    """Return metrics in one line; a progress bar's ``get_metrics`` may also give texts."""
    return " ".join(
        f"{name}={value}" if isinstance(value, str) else f"{name}={float(value):.4g}"
        for name, value in metrics.items()
    )


@dataclass(slots=True)
class EpochLine:
    """The line of an epoch that has ended."""

    count: Count
    #: Optimizer steps since the training began.
    step: int
    metrics: dict[str, float]
    is_best: bool

    def parts(self) -> tuple[str, str]:
        """Return the text before the metrics, and the one after them."""
        facts = [f"{self.count.title}: step {self.step}", self.count.rate()]
        return ", ".join(filter(None, facts)), ", best so far" if self.is_best else ""


class Lines:
    """Print a plain line for each epoch and each evaluation, and in long ones every 30 seconds."""

    #: Seconds until the next call of ``show``.
    pause = SECONDS_A_LINE

    def show(self, counts: Sequence[Count], metrics: dict[str, float]) -> None:
        count = counts[-1]
        title = ", ".join(count.title for count in counts)
        batches = f"{title}: {count.batches()} batches"
        self.say([batches, count.rate(), count.left(), metrics_text(metrics)])

    def end_epoch(self, line: EpochLine, prog_bar: dict[str, float]) -> None:
        """Show an epoch that has ended.

        Args:
            prog_bar: the metrics beside a bar.
        """
        before, after = line.parts()
        self.say([before, metrics_text(line.metrics) + after])

    def say(self, facts: Sequence[str]) -> None:
        """Print one line."""
        print(", ".join(filter(None, facts)), file=sys.stderr, flush=True)

    def stop(self) -> None:
        pass
