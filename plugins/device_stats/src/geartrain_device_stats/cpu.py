"""The CPU's figures, by psutil."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

import psutil

_MIB = 2**20
#: Seconds over which a utilisation is measured at least. The kernel counts a CPU's time in ticks of 10 ms (proc(5)): over less, it is
#: noise, and psutil asks for as much.
SHORTEST = 0.1
#: Every name that :meth:`Cpu.figures` may give.
NAMES = frozenset(
    {
        "cpu_utilization_percent",
        "process_cpu_percent",
        "process_rss_mib",
        "memory_used_percent",
        "memory_available_mib",
        "load_1m",
    }
)


class Cpu:
    """This machine's CPU and memory, and this process's share. Make it in the thread that asks: the percentages are of the time since
    that thread last asked."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._process = psutil.Process()
        self._percentages()  # psutil's first answer is 0.0, whatever the CPU does

    def figures(self) -> dict[str, float]:
        """What can be read here; a figure that cannot be (no permission, not on this system) is left out.

        Returns:
            Figures by name. ``cpu_utilization_percent``: of all cores, 0 to 100. ``process_cpu_percent``: 100 is one core.
            Neither is there within ``SHORTEST`` seconds, nor in another thread than the one that made this, whose measuring that
            would spoil.
        """
        found: dict[str, float] = {}
        if threading.get_ident() == self._thread and time.monotonic() - self._asked >= SHORTEST:
            found |= self._percentages()
        with suppress(psutil.Error, OSError):
            found["process_rss_mib"] = self._process.memory_info().rss / _MIB
        with suppress(psutil.Error, OSError):
            memory = psutil.virtual_memory()
            found |= {
                "memory_used_percent": memory.percent,
                "memory_available_mib": memory.available / _MIB,
            }
        with suppress(OSError, AttributeError):  # Windows has no load average
            found["load_1m"] = os.getloadavg()[0]
        return found

    def _percentages(self) -> dict[str, float]:
        self._asked = time.monotonic()
        found: dict[str, float] = {}
        with suppress(psutil.Error, OSError):
            found["cpu_utilization_percent"] = psutil.cpu_percent(interval=None)
        with suppress(psutil.Error, OSError):
            found["process_cpu_percent"] = self._process.cpu_percent(interval=None)
        return found
