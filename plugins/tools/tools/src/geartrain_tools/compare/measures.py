"""A plugin in a file: records the speed and the losses of each rank. ``compare`` adds it."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch

from geartrain import Run, hookimpl
from geartrain.plugin_api import BatchSizer

#: The environment variable with the time at which the command started.
STARTED = "GEARTRAIN_COMPARE_STARTED"
#: The folder in that of the run.
FOLDER = "compare"


class Measures:
    """Write ``compare/RANK.json`` in the run's folder.

    ``times``: seconds from the start of the command to the end of each step; ``losses``: this
    rank's, of each step; ``samples``: those of this rank; ``batches_of``: its number among ranks
    with other batches; ``memory``: its most bytes, of the GPU if it has one, or null; ``sent``: the
    bytes that the machine sent after the first step, or null.
    """

    def __init__(self) -> None:
        self._times: list[float] = []
        self._losses: list[float] = []
        self._loss = math.nan
        self._samples = 0
        self._sent: int | None = None

    @hookimpl
    def on_train_start(self, run: Run) -> None:
        self._sizer = BatchSizer(run.stages["train"].loaders[0], warns=False)

    @hookimpl
    def on_train_batch_end(self, outputs: Any, batch: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        # It waits for the device, so that the time of the step is true.
        self._loss = float(loss.detach().mean()) if isinstance(loss, torch.Tensor) else math.nan
        self._samples += self._sizer.size(batch) or 0

    @hookimpl
    def on_step_end(self) -> None:
        self._losses.append(self._loss)
        self._times.append(time.time() - float(os.environ[STARTED]))
        if len(self._times) == 1:
            self._sent = _sent()

    @hookimpl(wrapper=True)
    def on_train_end(self, run: Run) -> Generator[None, None, None]:
        sent = _sent()
        facts = {
            "times": self._times,
            "losses": self._losses,
            "batches_of": run.world.data_rank,
            "samples": self._samples,
            "memory": _memory(run.device),
            "sent": None if sent is None or self._sent is None else sent - self._sent,
        }
        if run.output is not None:
            path = Path(run.output, FOLDER, f"{run.world.rank}.json")
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(facts), encoding="utf-8")
        yield


def _memory(device: torch.device) -> int | None:
    """Return the most bytes that this process has had at once."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return None
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _sent() -> int | None:
    """Return the bytes that this machine has sent, to itself too; ``None`` without ``/proc``."""
    file = Path("/proc/net/dev")
    if not file.exists():
        return None
    lines = file.read_text(encoding="utf-8").splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[8]) for line in lines)
