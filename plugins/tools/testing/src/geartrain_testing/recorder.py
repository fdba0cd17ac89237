"""Plugins that run in the ranks of a conformance program and record events in files.

They write files, because the program cannot always read a rank's memory: if workers start on a
function, none of them runs the code after ``fit``.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from geartrain import Run, hookimpl
from geartrain_testing.launching import HAS_PROC, TOKEN, listening, processes
from geartrain_testing.nets import LARGE, copied, notes_of

#: Seconds by which a rank is late to a barrier, so that others may wrongly pass before it.
LATE = 0.4


#: Start of a file's name; the rank follows. The file's time is that of the rank's last step.
PROGRESS = "progress-"


def _do_nothing(run: Run, begins: bool = False) -> None:
    """Compare nothing."""


def save(value: Any, path: Path) -> None:
    """Write a file atomically."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    torch.save(value, beside)
    os.replace(beside, path)


class Recorder:
    """Writes one file per rank and run: ``COMMAND-N-rank-R.pt``.

    N counts a scenario's runs of that command.

    Args:
        folder: the scenario's folder.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.seen: dict[str, list[list[int]]] = {}
        self.curve: list[float] = []

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        self.seen, self.curve = {}, []
        # The kit compares ranks itself: a case names the fault, and others of the strategy pass.
        run.coordinator.check_agreement = _do_nothing  # type: ignore[method-assign]
        (self.folder / f"started-{run.world.rank}").touch()
        self.progress = self.folder / f"{PROGRESS}{run.world.rank}"

    @hookimpl(wrapper=True)
    def forward(self, run: Run, args: tuple[Any, ...]) -> Iterator[None]:
        if not run.repeating:
            self.seen.setdefault(f"{run.stage}-{run.epoch}", []).append(args[0][2].tolist())
            self.progress.touch()
        return (yield)

    @hookimpl
    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        if "loss_step" in metrics:
            self.curve.append(metrics["loss_step"])

    @hookimpl
    def on_run_end(self, run: Run) -> None:
        record = {
            "rank": run.world.rank,
            "size": run.world.size,
            "step": run.step,
            "epoch": run.epoch,
            "metrics": dict(run.metrics),
            "weights": copied(run.module.state_dict()),
            "notes": notes_of(run),
            "seen": self.seen,
            "curve": self.curve,
        }
        number = len(list(self.folder.glob(f"{run.command}-*-rank-{run.world.rank}.pt")))
        save(record, self.folder / f"{run.command}-{number}-rank-{run.world.rank}.pt")

    @hookimpl(wrapper=True)
    def teardown_process_group(self, run: Run) -> Iterator[None]:
        yield
        rank = run.world.rank
        (self.folder / f"left-{rank}").touch()
        if dist.is_available() and dist.is_initialized():
            (self.folder / f"group-stays-{rank}").touch()


class Collectives:
    """Calls each collective when the run starts, and records the results."""

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        rank, size = run.world.rank, run.world.size
        gather, notes = run.module.all_gather, notes_of(run)
        rows = torch.arange(3, device=run.device) + 10 * rank
        notes["gathered"] = {
            "equal": gather(rows),
            "scalar": gather(rows[0]),
            "unequal": list(gather(torch.full((rank + 1, 2), rank, device=run.device))),
            "nested": gather({"a": [rows, (rows.double(),)]}),
            "large": gather(rows + LARGE),
            "nan": gather(torch.where(rows == 10 * rank, math.nan, rows.double())),
        }
        objects = [
            run.hooks.broadcast(run=run, obj={"from": rank, "text": "é" * (rank + 1)}, src=src)
            for src in range(size)
        ]
        notes["broadcast"] = objects


class Barriers:
    """Makes each rank in turn late to a barrier, and records if this rank passed before it.

    Args:
        folder: a folder that all ranks share.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        rank, size = run.world.rank, run.world.size
        waited = []
        for late in range(size):
            here, through = (
                self.folder / f"barrier-{late}-{message}" for message in ("late", "through")
            )
            if rank == late:
                # The longer it waits, the more surely it finds a barrier that does not wait.
                deadline = time.monotonic() + LATE
                while time.monotonic() < deadline and not through.exists():
                    time.sleep(0.01)
                here.touch()
            run.hooks.barrier(run=run)
            waited.append(here.exists())
            through.touch()
        notes_of(run)["waited"] = waited


class Listening:
    """Records on rank 0, while all ranks train, the addresses on which the program listens."""

    @hookimpl
    def on_step_end(self, run: Run) -> None:
        run.hooks.barrier(run=run)
        if run.world.rank == 0 and HAS_PROC:
            notes_of(run)["listening"] = listening(processes(os.environ[TOKEN]))
        run.hooks.barrier(run=run)
