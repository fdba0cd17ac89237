"""Loops that take turns: a few steps of one, then of the next, so a drift affects all alike.

Each loop has a thread of its own, and one thread at a time runs.
"""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

#: A run in which a loop over the same loop is further from 1 than this shows nothing.
TRUSTED = 0.02


class Turns:
    """One loop's turns, and the loader of its batches, of which each turn gives all.

    Args:
        train: is called with this loader.
        batches: of a turn.
        turns: the number of turns.
    """

    def __init__(self, train: Callable[[Turns], Any], batches: Sequence[Any], turns: int) -> None:
        self.batches, self.turns = batches, turns
        self.seconds: list[float] = []  # CPU time of this process, by turn
        self.result: Any = None
        self.error: BaseException | None = None
        self.has_ended = False
        self._start: float | None = None
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._run, args=(train,), daemon=True).start()

    def __len__(self) -> int:
        return self.turns * len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.turns):
            self.wait()
            yield from self.batches
        self.stop()

    def take(self) -> None:
        """Let the loop run until its next turn; called in another thread."""
        self._go.release()
        self._back.acquire()

    def wait(self) -> None:
        """Wait for the next turn; called by the loop before its first step and between turns."""
        self.stop()
        self._back.release()
        self._go.acquire()
        self._start = time.process_time()

    def stop(self) -> None:
        """Take the time of the last turn; called by the loop after its last step."""
        if self._start is not None:
            self.seconds.append(time.process_time() - self._start)
        self._start = None

    def _run(self, train: Callable[[Turns], Any]) -> None:
        self._go.acquire()
        try:
            self.result = train(self)
        except BaseException as error:
            self.error = error
        self.has_ended = True
        self._back.release()


def alternate(
    loops: Mapping[str, Callable[[Turns], Any]], batches: Sequence[Any], turns: int
) -> tuple[dict[str, Turns], dict[str, str]]:
    """Run all loops to their end, in another order in each round.

    Returns:
        The loops by name, and by name why a loop is left out: what is not installed.
    """
    choose = random.Random(0)
    runs = {name: Turns(train, batches, turns) for name, train in loops.items()}
    absent: dict[str, str] = {}
    while left := [name for name, run in runs.items() if not run.has_ended]:
        for name in choose.sample(left, len(left)):
            run = runs[name]
            run.take()
            if isinstance(run.error, ImportError):
                absent[name] = str(run.error)
            elif run.error is not None:
                raise RuntimeError(f"{name} failed") from run.error
    return {name: run for name, run in runs.items() if name not in absent}, absent


def ratios(seconds: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """Return how long turns took over those of another loop: the median, and the quartiles."""
    each = [a / b for a, b in zip(seconds, base, strict=True)]
    low, middle, high = statistics.quantiles(each, n=4)
    return {"ratio": round(middle, 3), "quartiles": [round(low, 3), round(high, 3)]}


def pin() -> int | None:
    """Pin this process to one core, and return which; None where a system cannot."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    return core
