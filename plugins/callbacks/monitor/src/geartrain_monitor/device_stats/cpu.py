"""The CPU's values, read by psutil."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

import psutil

_MIB = 2**20
#: The shortest time, in seconds, over which a utilisation is measured. The kernel counts CPU time
#: in ticks of 10 ms (proc(5)), so a shorter measurement is noise. psutil recommends the same.
SHORTEST = 0.1
#: Every name that :meth:`Cpu.figures` may return.
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
    """This machine's CPU and memory, and this process's share.

    Create it in the thread that calls ``figures``: percentages are since that thread's last call.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._process = psutil.Process()
        self._percentages()  # psutil's first answer is always 0.0

    def figures(self) -> dict[str, float]:
        """Return the readable values; values that need a permission or another system are left out.

        Returns:
            Values by name. ``cpu_utilization_percent``: of all cores, 0 to 100.
            ``process_cpu_percent``: 100 is one core. Both are left out within ``SHORTEST`` seconds
            of the last call, and in any thread but the one that created this object, whose
            measurement they would disturb.
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
