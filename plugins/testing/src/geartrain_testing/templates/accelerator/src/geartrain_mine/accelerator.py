"""A device that stands for one of your own: it computes on the CPU, with a bounded number of threads."""

from __future__ import annotations

import os

import torch
from geartrain import Run, UsageError, hookimpl

#: The variable with the number of devices. On real hardware ask the driver, without initialising a device.
COUNT = "MINE_DEVICES"


class MineAccelerator:
    """Devices of the kind ``mine``.

    Args:
        threads: CPU threads that stand for one device.

    Raises:
        UsageError: no thread at all.
    """

    #: ``--accelerator auto`` takes the usable one of the highest priority. The cpu has 0, so this one is never taken
    #: unless a user names it. Hardware that is faster than the CPU should have more than 0.
    priority = -1

    def __init__(self, threads: int = 1) -> None:
        if threads < 1:
            raise UsageError(f"threads={threads!r} must be 1 or more.")
        self.threads = threads
        self._before = torch.get_num_threads()

    # --- asked before any run exists: the process may still fork, so neither may initialise a device ------------------

    @staticmethod
    def unavailable() -> str | None:
        """Return why it cannot be used here, as the user should read it; ``None`` if it can."""
        count = os.environ.get(COUNT, "")
        if count.isdigit() and int(count) > 0:
            return None
        return f"there is no device: {COUNT} is {count!r}. Fix: set it to the number of devices ({COUNT}=1)"

    @staticmethod
    def device_count() -> int:
        """Return the number of devices on this node; ``--devices auto`` takes all."""
        return int(os.environ.get(COUNT, "0"))

    # --- in each process of a run -------------------------------------------------------------------------------------

    @hookimpl
    def setup_device(self, run: Run, local_rank: int) -> torch.device:
        # `run.plan.devices` are the indices that the user chose: index = run.plan.devices[local_rank] is this
        # process's, and hardware returns torch.device("its_type", index). Core moves model and batches there.
        self._before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        return torch.device("cpu")

    @hookimpl
    def teardown_device(self, run: Run) -> None:
        # Called whatever happened, also after an error.
        torch.set_num_threads(self._before)
