"""An example accelerator: its devices are threads of the CPU. Replace them by your hardware."""

from __future__ import annotations

import os

import torch
from geartrain import Run, UsageError, hookimpl

#: The variable with the number of devices. For real hardware ask the driver instead.
COUNT = "MINE_DEVICES"


class MineAccelerator:
    """Devices of the kind ``mine``.

    Args:
        threads: CPU threads that stand for one device.

    Raises:
        UsageError: ``threads`` is below 1.
    """

    #: ``--accelerator auto`` takes the usable accelerator of the highest priority. The cpu has 0,
    #: so ``auto`` never takes this one. Hardware that is faster than the CPU should have more.
    priority = -1

    def __init__(self, threads: int = 1) -> None:
        if threads < 1:
            raise UsageError(f"threads={threads!r} must be 1 or more.")
        self.threads = threads
        self._before = torch.get_num_threads()

    # --- before a run: the process may still fork, so do not initialise a device here -------------

    @staticmethod
    def unavailable() -> str | None:
        """Return the reason, for the user, why this accelerator cannot be used, or ``None``."""
        count = os.environ.get(COUNT, "")
        if count.isdigit() and int(count) > 0:
            return None
        return f"{COUNT} is {count!r}. Fix: set it to the number of devices ({COUNT}=1)"

    @staticmethod
    def device_count() -> int:
        """Return the number of devices on this node; ``--devices auto`` takes all."""
        return int(os.environ.get(COUNT, "0"))

    # --- in each process of a run -----------------------------------------------------------------

    @hookimpl
    def setup_device(self, run: Run, local_rank: int) -> torch.device:
        # Hardware returns torch.device("its_type", run.plan.devices[local_rank]) here.
        self._before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        return torch.device("cpu")

    @hookimpl
    def teardown_device(self, run: Run) -> None:
        torch.set_num_threads(self._before)
