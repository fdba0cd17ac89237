"""Cost of checkpoints: throughput with one every 100 steps, over a run without any.

An MLP and Adam, one thread for torch, pre-batched data. The runs alternate in this
process: without checkpoints, with ModelCheckpoint, and with ``async_checkpoint`` too. The time is
that of the steps and of the end of the fit, when every file is complete. The median round counts.
With ``--wait 1`` a step also waits for 1 ms, as for a GPU.

    python benchmarks/checkpoints.py [--steps 1000] [--rounds 9] [--width 2000] [--wait 1]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import geartrain as gt
from geartrain.callbacks import AsyncCheckpoint, ModelCheckpoint


class MLP(gt.Module):
    def __init__(self, width: int, wait: float) -> None:
        super().__init__()
        self.wait = wait
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.wait:
            time.sleep(self.wait / 1000)
        return functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.001)


class Stopwatch:
    """Measure the steps and the end of the fit; seconds."""

    @gt.hookimpl
    def on_train_start(self):
        self._start = time.perf_counter()

    def stop(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - self._start


def measure(kind: str, options: argparse.Namespace, batches: list[object]) -> tuple[float, int]:
    """Return the seconds of a fit, and the bytes of its last checkpoint."""
    watch = Stopwatch()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        plugins: list[object] = [watch]
        if kind != "none":
            plugins.append(ModelCheckpoint(dirpath=folder, every_n_train_steps=options.every))
        if kind == "async":
            plugins.append(AsyncCheckpoint())
        trainer = gt.Trainer(
            accelerator=options.accelerator,
            devices=1,
            max_epochs=1,
            enable_progress_bar=False,
            seed=1,
            plugins=plugins,
        )
        trainer.fit(MLP(options.width, options.wait), batches)
        seconds = watch.stop()
        sizes = [path.stat().st_size for path in Path(folder).glob("*.ckpt")]
    return seconds, max(sizes, default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--width", type=int, default=2000)
    parser.add_argument("--wait", type=float, default=0.0, help="ms of each step, without work")
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--accelerator", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--folder", help="where to write; default: the folder for temporary files")
    options = parser.parse_args()
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(1)
    x = torch.randn(options.batch, 64, generator=random)
    batches = [(x, torch.arange(options.batch) % 10)] * options.steps
    rounds: dict[str, list[float]] = {"none": [], "sync": [], "async": []}
    size = 0
    for _ in range(options.rounds + 1):
        for kind, times in rounds.items():
            seconds, found = measure(kind, options, batches)
            times.append(seconds)
            size = max(size, found)
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )
    print(f"{options.steps} steps, a checkpoint of {size / 2**20:.2f} MiB every {options.every}")
    for kind, times in rounds.items():
        kept = times[1:]  # the first round warms up
        ratios = [none / each for none, each in zip(rounds["none"][1:], kept, strict=True)]
        print(
            f"{kind:5}  {statistics.median(kept) / options.steps * 1e3:.3f} ms a step, "
            f"throughput {statistics.median(ratios):.1%} "
            f"(from {min(ratios):.1%} to {max(ratios):.1%})"
        )


if __name__ == "__main__":
    main()
