"""elastic: seconds from a killed process to the next trained step, and the cost of virtual ranks.

    python benchmarks/elastic.py kills [--repeats 20] [--ranks 3] [--no-replace]
    python benchmarks/elastic.py ranks [--rounds 5]
    python benchmarks/elastic.py bytes [--width 1024]

``kills`` kills the last rank in the middle of a step, once each 40 steps, and takes the time until
rank 0 has done that step; torchrun's restart is in restarts.py. ``ranks`` compares the time per
sample of four virtual ranks in each of two processes with ddp on two, which accumulates four
batches. ``bytes`` counts the bytes that the loopback interface carries per step, beside ddp.
The step of one rank per process is in strategies.py.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt
from geartrain_elastic import ElasticStrategy


class Net(gt.Module):
    """Four hidden layers; the last rank may kill its process.

    Args:
        width: of the layers.
        folder: for the times of kills; empty for a run without kills.
        every: steps from one kill to the next.
    """

    def __init__(self, width: int, folder: str = "", every: int = 40) -> None:
        super().__init__()
        layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.net = nn.Sequential(*layers, nn.Linear(width, 10))
        self.folder, self.every = folder, every

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        step, last = self.trainer.global_step, self.trainer.world_size - 1
        if self.folder and step % self.every == self.every - 1:
            file = Path(self.folder, str(step))
            if self.trainer.global_rank == last and not file.exists():
                file.write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.folder and self.trainer.global_rank == 0:
            Path(self.folder, f"{self.trainer.global_step}.done").write_text(str(time.monotonic()))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-3)


class Clock:
    """Write the median step of rank 0, and the bytes of the loopback interface, to a file."""

    def __init__(self, file: str) -> None:
        self.file, self.ends, self.sent = file, [0.0], [0]

    @gt.hookimpl
    def on_step_end(self, run: gt.Run) -> None:
        self.ends.append(time.perf_counter())
        self.sent.append(int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text()))

    @gt.hookimpl
    def on_run_end(self, run: gt.Run) -> None:
        if run.world.rank == 0:
            half = len(self.ends) // 2
            times = [b - a for a, b in zip(self.ends[half:], self.ends[half + 1 :], strict=False)]
            count = len(self.sent) - 1 - half
            sent = (self.sent[-1] - self.sent[half]) / count
            Path(self.file).write_text(json.dumps([statistics.median(times), sent]))


def data(samples: int, width: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, width, generator=generator)
    return TensorDataset(x, torch.randint(0, 10, (samples,), generator=generator))


def fit(strategy: Any, net: Net, width: int, steps: int, batch: int = 32, **options: Any) -> None:
    trainer = gt.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_steps=steps,
        seed=1,
        enable_progress_bar=False,
        **{"devices": 2, **options},
    )
    trainer.fit(net, DataLoader(data(4096, width), batch_size=batch, shuffle=True))


def kills(given: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds from each kill to the end of the step in which it came."""
    with tempfile.TemporaryDirectory() as folder:
        net = Net(given.width, folder)
        strategy = ElasticStrategy(replace=not given.no_replace)
        fit(strategy, net, given.width, 40 * given.repeats + 20, devices=given.ranks)
        found = []
        for step in range(39, 40 * given.repeats, 40):
            killed, done = Path(folder, str(step)), Path(folder, f"{step}.done")
            found.append(float(done.read_text()) - float(killed.read_text()))
    return {"median": statistics.median(found), "least": min(found), "most": max(found)}


def measured(strategy: Any, net: Net, width: int, steps: int, **options: Any) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "figures"))
        fit(strategy, net, width, steps, plugins=[Clock(file)], **options)
        figures: list[float] = json.loads(Path(file).read_text())
        return figures


def ranks(given: argparse.Namespace) -> dict[str, Any]:
    """Return the times of a step with 8 batches of 32 samples on two processes, and their ratio."""
    rounds = []
    for _ in range(given.rounds):
        steps, width = 15, given.width
        strategy = ElasticStrategy(virtual_ranks=8)
        virtual, _ = measured(strategy, Net(width), width, steps)
        ddp, _ = measured("ddp_spawn", Net(width), width, steps, accumulate_grad_batches=4)
        rounds.append((virtual, ddp))
    ratios = [virtual / ddp for virtual, ddp in rounds]
    return {
        "elastic ms": 1e3 * statistics.median(virtual for virtual, _ in rounds),
        "ddp ms": 1e3 * statistics.median(ddp for _, ddp in rounds),
        "ratio": [statistics.median(ratios), min(ratios), max(ratios)],
    }


def counted(given: argparse.Namespace) -> dict[str, Any]:
    """Return the bytes per step of two processes."""
    width = given.width
    elastic = measured("elastic", Net(width), width, 60)[1]
    ddp = measured("ddp_spawn", Net(width), width, 60)[1]
    return {"elastic": elastic, "ddp": ddp, "ratio": elastic / ddp}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measure", choices=["kills", "ranks", "bytes"])
    parser.add_argument("--repeats", type=int, default=20, help="kills")
    parser.add_argument("--ranks", type=int, default=3, help="of which one is killed")
    parser.add_argument("--no-replace", action="store_true", help="the others take over its rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=256, help="of four hidden layers")
    given = parser.parse_args()
    found = {"kills": kills, "ranks": ranks, "bytes": counted}[given.measure](given)
    json.dump({**found, **vars(given), "torch": torch.__version__}, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
