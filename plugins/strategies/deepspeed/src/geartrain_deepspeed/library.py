"""DeepSpeed itself: is it installed, and does it use the run's devices?

It is imported in the ranks only: the import takes seconds, and chooses an accelerator for good.
"""

from __future__ import annotations

import logging
import os
import warnings
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from geartrain import Run, UsageError
from geartrain_deepspeed.agreed import OrderedBackend


def check_installed(label: str) -> None:
    """Raise if DeepSpeed cannot be imported.

    Raises:
        UsageError: it is not installed.
    """
    if find_spec("deepspeed") is None:
        message = f"{label}: DeepSpeed is not installed"
        raise UsageError(f"{message}. Fix: pip install 'deepspeed>=0.19.8,<0.20'")


def load(label: str, device: str) -> Any:
    """Import DeepSpeed for a type of device.

    Raises:
        UsageError: this process has imported it for another one.
    """
    os.environ.setdefault("DS_ACCELERATOR", device)
    import deepspeed
    from deepspeed.utils import logger

    chosen = deepspeed.get_accelerator().device_name()
    if chosen != device:
        message = f"{label}: this process uses DeepSpeed for {chosen}, and the run is on {device}"
        raise UsageError(f"{message}. Fix: DS_ACCELERATOR={device} in the environment")
    logger.setLevel("WARNING")  # it reports each of its settings, on each rank
    logger.addFilter(_is_for_users)
    # torch 2.13 warns at each gather and reduction of stage 3.
    warnings.filterwarnings("ignore", ".*torch.distributed.*_tensor.*deprecated", FutureWarning)
    # An all-reduce in shared memory, which DeepSpeed would compile now, for the CPU alone.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def agree(run: Run) -> None:
    """Let the ranks of a run agree on each collective of DeepSpeed."""
    from deepspeed.comm import comm

    comm.cdb = OrderedBackend(comm.cdb, run)


def _is_for_users(record: logging.LogRecord) -> bool:
    """Filter the warning that torch's optimizers are not DeepSpeed's: docs/deepspeed.md has it."""
    return "untested optimizer" not in record.getMessage()


def leave() -> None:
    """Make DeepSpeed forget the process group, which is destroyed with its references."""
    with suppress(ImportError):
        from deepspeed.comm import comm

        if comm.cdb is not None:
            comm.destroy_process_group()
            comm.cdb = None
