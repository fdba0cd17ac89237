"""The clock: the time in each hookimpl, without the time in those that it calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from geartrain.plugin_api import close_batches

#: The slot of the time until a batch arrives, which is no hook's.
BATCHES = ("", "batches")


@dataclass(frozen=True, slots=True)
class Reading:
    """The state of a clock: seconds and calls of each slot, and the seconds that it ran."""

    wall: float
    seconds: list[float]
    calls: list[int]

    def __sub__(self, earlier: Reading) -> Reading:
        return Reading(
            self.wall - earlier.wall,
            [a - b for a, b in zip(self.seconds, earlier.seconds, strict=True)],
            [a - b for a, b in zip(self.calls, earlier.calls, strict=True)],
        )


class Clock:
    """Counts seconds and calls in slots. A slot belongs to one plugin and one hook.

    A timer costs two readings of the clock and a few list items. Each second counts in one slot: a
    hookimpl that calls another does not count the other's time.
    """

    def __init__(self) -> None:
        #: (plugin's label, hook) of each slot; the first is that of TimedBatches. Timers are made
        #: before the clock starts.
        self.slots: list[tuple[str, str]] = [BATCHES]
        self._seconds: list[float] = [0.0]
        self._calls: list[int] = [0]
        #: The seconds that timers inside the running timer have counted.
        self._inner = [0.0]
        #: The time at which the clock would have started without the pauses.
        self._start = 0.0

    def start(self) -> None:
        """Start to count at zero; the slots stay."""
        self._start, self._inner[0] = perf_counter(), 0.0
        self._seconds[:] = [0.0] * len(self.slots)
        self._calls[:] = [0] * len(self.slots)

    def read(self) -> Reading:
        return Reading(perf_counter() - self._start, [*self._seconds], [*self._calls])

    def set_back(self, reading: Reading) -> Reading:
        """Forget all since ``reading``, and return it."""
        current = self.read()
        self._start += current.wall - reading.wall
        self._seconds[:], self._calls[:] = reading.seconds, reading.calls
        return current - reading

    def slot(self, label: str, hook: str) -> int:
        """Return the index of a slot, which is created if it does not exist."""
        if (label, hook) not in self.slots:
            self.slots.append((label, hook))
            self._seconds.append(0.0)
            self._calls.append(0)
        return self.slots.index((label, hook))

    def timer(
        self, function: Callable[..., Any], label: str, hook: str, count: int = 1
    ) -> Callable[..., Any]:
        """Return ``function`` with its time counted in a slot, and ``count`` calls each time."""
        slot, inner, current = self.slot(label, hook), self._inner, perf_counter
        seconds, calls = self._seconds, self._calls

        def timed(*arguments: Any, **named: Any) -> Any:
            outer, inner[0] = inner[0], 0.0
            start = current()
            try:
                return function(*arguments, **named)
            finally:
                taken = current() - start
                seconds[slot] += taken - inner[0]
                calls[slot] += count
                inner[0] = outer + taken

        return timed

    def wrapper_timer(
        self, function: Callable[..., Any], label: str, hook: str
    ) -> Callable[..., Any]:
        """Return a wrapper's function with the time before and after its ``yield`` counted."""

        def call(part: Callable[..., Any], *arguments: Any) -> Any:
            return part(*arguments)

        before = self.timer(call, label, hook)
        after = self.timer(call, label, hook, count=0)

        def generator(*arguments: Any, **named: Any) -> _Timed:
            return _Timed(function(*arguments, **named), before, after)

        return generator


class _Timed:
    """A wrapper's generator for pluggy, with its time counted."""

    __slots__ = ("_after", "_before", "_generator", "close", "gi_code")

    def __init__(
        self, generator: Any, before: Callable[..., Any], after: Callable[..., Any]
    ) -> None:
        self._generator, self._before, self._after = generator, before, after
        self.gi_code, self.close = generator.gi_code, generator.close

    def __next__(self) -> Any:
        return self._before(self._generator.__next__)

    def send(self, value: Any) -> Any:
        return self._after(self._generator.send, value)

    def throw(self, error: BaseException) -> Any:
        return self._after(self._generator.throw, error)


class TimedBatches:
    """Batches of ``device_batches``, with the time until each arrives counted."""

    def __init__(self, batches: Iterator[Any], loader: Any, clock: Clock) -> None:
        self._batches, self._loader = batches, loader
        self._next = clock.timer(batches.__next__, *BATCHES)

    def __iter__(self) -> TimedBatches:
        return self

    def __next__(self) -> Any:
        return self._next()

    def close(self) -> None:
        """Close the iterator of the hook's owner."""
        close_batches(self._batches, self._loader)
