"""The ``cpu`` accelerator."""

from __future__ import annotations

import os


class CPUAccelerator:
    """Trains on the CPU. ``devices=N`` means N processes, which share the cores."""

    priority = 0
    indexed = False

    @staticmethod
    def unavailable() -> str | None:
        """Return ``None``: every machine has a CPU."""
        return None

    @staticmethod
    def device_count() -> int:
        """Return the cores that this process may use. ``devices`` may be more."""
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1
