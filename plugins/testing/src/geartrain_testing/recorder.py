"""Plugins that run inside the ranks of a conformance program and keep what happens there, in files.

Files, because not every strategy's ranks are the program: where workers start on a function, the code after ``fit`` runs in none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from geartrain import Run, hookimpl
from geartrain_testing.launching import HAS_PROC, TOKEN, listening, processes
from geartrain_testing.nets import notes_of

#: Seconds that a rank which is late to a barrier gives the others to come out of it too early.
LATE = 0.4


#: A file whose time is that of a rank's last step; the rank follows.
PROGRESS = "progress-"


def save(value: Any, path: Path) -> None:
    """Write a file whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    torch.save(value, beside)
    os.replace(beside, path)


class Recorder:
    """Writes one file for each rank and run: ``COMMAND-N-rank-R.pt``, where N counts a scenario's runs of that command.

    Args:
        folder: the scenario's.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.seen: dict[str, list[list[int]]] = {}
        self.curve: list[float] = []

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        self.seen, self.curve = {}, []
        (self.folder / f"started-{run.world.rank}").touch()
        self.progress = self.folder / f"{PROGRESS}{run.world.rank}"

    @hookimpl(wrapper=True)
    def forward(self, run: Run, args: tuple[Any, ...]) -> Iterator[None]:
        if not run.repeating:
            self.seen.setdefault(f"{run.stage}-{run.epoch}", []).append(args[0][2].tolist())
            self.progress.touch()
        return (yield)

    @hookimpl
    def log_metrics(self, metrics: dict[str, float]) -> None:
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
            "weights": {
                name: tensor.detach().cpu().clone()
                for name, tensor in run.module.state_dict().items()
            },
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
    """Calls each collective when the run starts and notes the answers."""

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        rank, size, gather, notes = (
            run.world.rank,
            run.world.size,
            run.module.all_gather,
            notes_of(run),
        )
        mine = torch.arange(3, device=run.device) + 10 * rank
        notes["gathered"] = {
            "equal": gather(mine),
            "scalar": gather(mine[0]),
            "unequal": list(gather(torch.full((rank + 1, 2), rank, device=run.device))),
            "nested": gather({"a": [mine, (mine.double(),)]}),
        }
        objects = [
            run.hooks.broadcast(run=run, obj={"from": rank, "text": "é" * (rank + 1)}, src=src)
            for src in range(size)
        ]
        notes["broadcast"] = objects


class Barriers:
    """Lets each rank in turn be late to a barrier, and notes whether it had come when this rank got through.

    Args:
        folder: where ranks see each other's files.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        rank, size = run.world.rank, run.world.size
        waited = []
        for late in range(size):
            here, through = (self.folder / f"barrier-{late}-{what}" for what in ("late", "through"))
            if rank == late:
                # Not synchronisation: the longer it waits, the surer a barrier that does not wait is caught.
                deadline = time.monotonic() + LATE
                while time.monotonic() < deadline and not through.exists():
                    time.sleep(0.01)
                here.touch()
            run.hooks.barrier(run=run)
            waited.append(here.exists())
            through.touch()
        notes_of(run)["waited"] = waited


class Listening:
    """Notes on rank 0, while all ranks train, on which addresses the program's processes listen."""

    @hookimpl
    def on_step_end(self, run: Run) -> None:
        run.hooks.barrier(run=run)
        if run.world.rank == 0 and HAS_PROC:
            notes_of(run)["listening"] = listening(processes(os.environ[TOKEN]))
        run.hooks.barrier(run=run)
