"""The thread that samples, and the transfer of its samples to the training thread."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from geartrain import TrainingError
from geartrain_monitor.device_stats.cpu import NAMES, Cpu
from geartrain_monitor.device_stats.nodes import Nodes

if TYPE_CHECKING:
    from geartrain import Run

#: The most seconds that training waits for the thread: for a first sample, and for its end.
PATIENCE = 5.0


class Monitor:
    """Take a sample every ``interval`` seconds until stopped.

    An error ends the thread, never the training. The training thread checks ``figures`` and
    ``notes`` after each batch; they are deques, whose ``append`` and ``pop`` need no lock.
    """

    def __init__(self, run: Run, interval: float, cpu_stats: bool = True) -> None:
        self._run, self._interval, self._cpu_stats = run, interval, cpu_stats
        #: The newest sample, until it is logged.
        self.figures: deque[dict[str, float]] = deque(maxlen=1)
        #: The message to the user, until it is printed.
        self.notes: deque[str] = deque()
        #: The CPU's values, once the thread runs, if they are wanted.
        self.cpu: Cpu | None = None
        self._nodes = Nodes(run)
        self._wake, self._sampled = threading.Event(), threading.Event()
        self._stopping = self._asked = False
        # A daemon, so that a driver that hangs cannot keep the program alive.
        self._thread = threading.Thread(target=self._work, name="device_stats", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def first(self) -> None:
        """Take the first sample now if none exists; wait at most ``PATIENCE`` seconds."""
        if not self._asked and not self._sampled.is_set():
            self._wake.set()
            self._sampled.wait(PATIENCE)
        self._asked = True

    def stop(self) -> bool:
        """End the thread. Return True if it ended within ``PATIENCE`` seconds."""
        self._stopping = True
        self._wake.set()
        self._thread.join(PATIENCE)
        return not self._thread.is_alive()

    def _work(self) -> None:
        try:
            self.cpu = Cpu() if self._cpu_stats else None
            self._nodes.connect()
            while not self._stopping:
                self._wake.wait(self._interval)
                if self._stopping:
                    break
                self._take()
                self._sampled.set()
                self._wake.clear()
        except Exception as error:
            self._run.hooks.explain(error)
            text = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
            self.notes.append(f"device_stats takes no more samples; training continues: {text}")
        finally:
            self._sampled.set()

    def _take(self) -> None:
        mine = sample(self._run)
        if self._run.world.rank == 0 and not self._sampled.is_set() and mine.keys() <= NAMES:
            self.notes.append(_only_the_cpu(self._run, self._cpu_stats))
        figures = self._nodes.exchange(mine)
        if figures:
            self.figures.append(figures)


def sample(run: Run) -> dict[str, float]:
    """Merge the answers of all implementations of ``device_stats``.

    Raises:
        TrainingError: two plugins give the same name, or a value is not a number.
    """
    figures: dict[str, float] = {}
    for given in run.hooks.device_stats(run=run):
        for name, value in given.items():
            if name in figures or isinstance(value, bool) or not isinstance(value, int | float):
                message = (
                    f"gives {name!r} twice"
                    if name in figures
                    else f"gives {name}={value!r}, which is not a number"
                )
                owner = ", ".join(choice.label for choice in run.hooks.implementers("device_stats"))
                raise TrainingError(
                    f"device_stats of {owner} {message}. "
                    "Fix: take one of them out, or give its figures other names"
                )
            figures[name] = float(value)
    return figures


def _only_the_cpu(run: Run, cpu_stats: bool) -> str:
    accelerator = run.plan.accelerator
    asked = accelerator in run.hooks.implementers("device_stats")
    reason = "its device_stats gave none" if asked else "it has no device_stats"
    return (
        f"device_stats: {accelerator.name} ({accelerator.label}) reports no figures ({reason}); "
        + ("only the CPU's are logged" if cpu_stats else "nothing is logged. Fix: cpu_stats=True")
    )
