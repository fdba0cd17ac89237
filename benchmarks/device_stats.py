"""Cost of the plugin device_stats: step time with the plugin over step time without it.

The loop of overhead.py: MLP 64-WIDTH-10, batch 32, SGD, pre-batched data, one thread, CPU, and a
logger. Runs with and without the plugin alternate in this process, and their order changes each
round. Each round gives a ratio; the median counts. There are two ratios. Wall time includes the
loop's waiting for the interpreter lock. CPU time of the whole process includes the sampling thread,
and other programs disturb it less. A run lasts long enough for samples; the clock runs from the
first batch to the end of the last step.

    python benchmarks/device_stats.py [--interval 5.0] [--seconds 5.5] [--rounds 18] [--width 64]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Iterator

import psutil
import torch
from torch import nn
from torch.nn import functional

import geartrain as gt
from geartrain_monitor.device_stats import DeviceStats
from geartrain_monitor.device_stats.cpu import Cpu


class MLP(gt.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Timed:
    """Yield batches for some seconds, and measure the time per step."""

    def __init__(self, batches, seconds: float) -> None:
        self.batches, self.seconds = batches, seconds
        self.step_us = self.cpu_us = 0.0

    def __iter__(self) -> Iterator:
        start, cpu, rounds, elapsed = time.perf_counter(), time.process_time(), 0, 0.0
        while elapsed < self.seconds:  # checked once in a hundred steps
            yield from self.batches
            rounds += 1
            elapsed = time.perf_counter() - start
        steps = rounds * len(self.batches)
        self.step_us, self.cpu_us = elapsed / steps * 1e6, (time.process_time() - cpu) / steps * 1e6


class Logger:
    """A logger that costs almost nothing; without a logger no values are logged."""

    samples = 0

    @gt.hookimpl
    def log_metrics(self, metrics):
        self.samples += "process_rss_mib" in metrics


def one_run(batches, seconds: float, width: int, plugins) -> tuple[float, float, int]:
    """Return µs per step by the wall clock and of CPU time, and the number of logged samples."""
    timed, logger = Timed(batches, seconds), Logger()
    trainer = gt.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        enable_progress_bar=False,
        plugins=[logger, *plugins],
    )
    trainer.fit(MLP(width), timed)
    return timed.step_us, timed.cpu_us, logger.samples


def one_sample() -> float:
    """Return the µs of one CPU sample, including utilisations, while nothing else runs."""
    cpu, times = Cpu(), []
    for _ in range(20):
        time.sleep(0.11)  # if it were shorter, the utilisations would be left out
        start = time.perf_counter()
        cpu.figures()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--interval", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=5.5, help="how long each run lasts")
    parser.add_argument("--rounds", type=int, default=18)
    parser.add_argument("--width", type=int, default=64, help="hidden units")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*reports no figures")
    batches = [(torch.randn(32, 64), torch.randint(0, 10, (32,))) for _ in range(100)]
    without, with_it = [], []
    one_run(batches, 1.0, options.width, [])  # warm-up
    for round_ in range(options.rounds):
        for turn in (False, True) if round_ % 2 else (True, False):
            run = one_run(
                batches,
                options.seconds,
                options.width,
                [DeviceStats(options.interval)] if turn else [],
            )
            (with_it if turn else without).append(run)
    facts = {
        "without_us": round(statistics.median(run[0] for run in without), 2),
        "with_us": round(statistics.median(run[0] for run in with_it), 2),
        "wall": _ratios([b[0] / a[0] for a, b in zip(without, with_it, strict=True)]),
        "cpu": _ratios([b[1] / a[1] for a, b in zip(without, with_it, strict=True)]),
        "sample_us": round(one_sample(), 1),
        "interval_s": options.interval,
        "samples_a_run": statistics.median(run[2] for run in with_it),
        "seconds_a_run": options.seconds,
        "rounds": options.rounds,
        "width": options.width,
        "torch": torch.__version__,
        "psutil": psutil.__version__,
        "python": platform.python_version(),
    }
    print(json.dumps(facts, indent=2))


def _ratios(ratios: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"median": round(middle, 4), "quartiles": f"{low:.4f} to {high:.4f}"}


if __name__ == "__main__":
    main()
