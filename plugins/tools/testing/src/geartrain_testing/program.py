"""The conformance kit's program: ``python -m geartrain_testing.program REQUESTS.json``.

It is a separate program that chooses the strategy by name, as users do. Strategies start their
ranks from the user's command: they run it again, start ranks on a function, or run under a
launcher. The program runs its requests, and the scenarios of a request, one after another.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain.plugin_api import detect
from geartrain_testing.nets import OPTIMIZER, Net, samples
from geartrain_testing.recorder import Recorder, save

#: Scenarios in which N ranks must have the result of one process.
COMPARED = (
    "sgd",
    "adam",
    "many_buckets",
    "accumulation",
    "clipping",
    "two_optimizers",
    "frozen",
    "unused_parameters",
    "scheduler",
    "step_end",
    "fit_twice",
    "weighted_loss",
)


@dataclass
class Request:
    """Scenarios that a program runs on one strategy."""

    strategy: str
    options: dict[str, Any]
    accelerator: str
    devices: int
    folder: str
    scenarios: list[str]
    #: The number of ranks for which data is made; the same in the one process to compare with.
    ranks: int
    #: Samples in one process's batch, and in the batches of all ranks together.
    batch: int
    global_batch: int
    num_nodes: int = 1
    #: For the scenario ``fault``: ``{"kind": ..., "where": ...}``.
    fault: dict[str, str] = field(default_factory=dict)
    #: The optimizer of every module and its arguments, ``{"class": "package:Name", ...}``; empty:
    #: torch's optimizers.
    optimizer: dict[str, Any] = field(default_factory=dict)


def write(requests: Sequence[Request], path: Path) -> None:
    """Write a program's requests to a file."""
    path.write_text(json.dumps([asdict(request) for request in requests], indent=2))


def read(path: Path) -> list[Request]:
    """Read a program's requests."""
    return [Request(**request) for request in json.loads(path.read_text())]


class Job:
    """One scenario of a request: makes its trainers and loaders.

    Args:
        request: the program's request.
        name: the name of the scenario and of its folder.
    """

    def __init__(self, request: Request, name: str) -> None:
        self.request, self.ranks = request, request.ranks
        self.folder = Path(request.folder, name)
        self.folder.mkdir(parents=True, exist_ok=True)
        #: The caller's view after each run.
        self.caller: list[dict[str, Any]] = []

    def trainer(self, *plugins: Any, **options: Any) -> gt.Trainer:
        """Return a trainer with the strategy, a :class:`Recorder` and quiet defaults."""
        request = self.request
        defaults = {
            "enable_progress_bar": False,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            "max_epochs": 1,
        }
        return gt.Trainer(
            accelerator=request.accelerator,
            devices=request.devices,
            num_nodes=request.num_nodes,
            strategy=request.strategy,
            strategy_options=request.options,
            plugins=[*plugins, Recorder(str(self.folder))],
            **{**defaults, **options},
        )

    def batches(self, count: int) -> DataLoader[Any]:
        """Return a training loader of ``count`` full batches for each rank, in order."""
        return DataLoader(samples(count * self.request.global_batch), self.request.batch)

    def fit(self, module: Net, batches: int = 7, **options: Any) -> None:
        """Train, and record the caller's view."""
        trainer = self.trainer(**options)
        trainer.fit(module, self.batches(batches))
        self.keep(trainer, module)

    def keep(self, trainer: gt.Trainer, module: Net, result: Any = None) -> None:
        """Record the caller's view after a run."""
        self.caller.append(
            {
                "weights": {
                    name: tensor.detach().cpu().clone()
                    for name, tensor in module.state_dict().items()
                },
                "metrics": dict(trainer.run.metrics),
                "step": trainer.global_step,
                "epoch": trainer.current_epoch,
                "result": result,
                "group stays": dist.is_available() and dist.is_initialized(),
            }
        )

    def finish(self, caller: bool) -> None:
        """Write the caller's view, and mark the scenario as done."""
        if caller:
            save(self.caller, self.folder / "caller.pt")
            (self.folder / "done").touch()


def main(path: str) -> None:
    """Run the scenarios of each request."""
    from geartrain_testing.scenarios import SCENARIOS

    torch.set_num_threads(1)  # the models are tiny: more threads would only compete for cores
    # A rank that is this program run again, and a second node, have variables in their environment.
    # Read them before the first fit sets them.
    place = detect()
    caller = os.environ.get("NODE_RANK", "0") == "0" if place is None else place.rank == 0
    for request in read(Path(path)):
        # In the environment, so that ranks that start on a function inherit it.
        os.environ[OPTIMIZER] = json.dumps(request.optimizer)
        for name in request.scenarios:
            job = Job(request, name)
            try:
                SCENARIOS[name](job)
            except gt.UsageError as error:
                print(f"conformance: {error}", file=sys.stderr)
                raise SystemExit(2) from error  # as the command line exits
            job.finish(caller)
            # Every run of several ranks collects garbage at its end, and a program makes dozens of
            # runs. Without the objects of imported modules this takes 1 ms instead of 200 ms.
            gc.collect()
            gc.freeze()


if __name__ == "__main__":
    main(sys.argv[1])
