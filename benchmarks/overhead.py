"""What the loop costs over the hand-written loop, in µs a step.

MLP 64-64-10, batch 32, cross-entropy, SGD, pre-batched data, one thread, CPU. All loops run in this process, in turn, and the
median round is compared, so that a drift of the machine's speed meets all alike. ``session`` is the hand-written loop with a Session.

    python benchmarks/overhead.py [--steps 1000] [--rounds 15] [--log] [--cpu]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time

import torch
from torch import nn
from torch.nn import functional

import geartrain as gt

#: What measures; ``--cpu`` takes the thread's CPU time, for a machine with other work.
clock = time.perf_counter


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class MLP(gt.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def training_step(self, batch, batch_idx):
        x, y = batch
        return functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class LoggingMLP(MLP):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class Stopwatch:
    """Times the steps alone: from the run's start, when everything is set up, to its end."""

    @gt.hookimpl
    def on_run_start(self):
        self.start = clock()

    @gt.hookimpl
    def on_run_end(self):
        self.seconds = clock() - self.start


def raw_loop(batches) -> float:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    start = clock()
    for x, y in batches:
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
    return clock() - start


def geartrain_loop(batches, log: bool) -> float:
    watch = Stopwatch()
    trainer = gt.Trainer(accelerator="cpu", devices=1, max_epochs=1, enable_progress_bar=False, plugins=[watch])
    trainer.fit(LoggingMLP() if log else MLP(), batches)
    return watch.seconds


def session_loop(batches) -> float:
    with gt.Session(accelerator="cpu", devices=1) as session:
        net = make_net()
        net, optimizer = session.setup(net, torch.optim.SGD(net.parameters(), lr=0.01))
        loader = session.setup_dataloaders(batches)
        start = clock()
        for x, y in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(x), y)
            session.backward(loss)
            optimizer.step()
        return clock() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--log", action="store_true", help="one self.log a step")
    parser.add_argument("--cpu", action="store_true", help="this thread's CPU time, not wall time: for a machine with other work")
    options = parser.parse_args()
    if options.cpu:
        global clock
        clock = time.thread_time
    torch.set_num_threads(1)
    batches = [(torch.randn(32, 64), torch.randint(0, 10, (32,))) for _ in range(options.steps)]
    raw, ours, session = [], [], []
    for round_ in range(options.rounds + 1):
        times = raw_loop(batches), geartrain_loop(batches, options.log), session_loop(batches)
        if round_:  # the first warms up
            for kept, seconds in zip((raw, ours, session), times, strict=True):
                kept.append(seconds / options.steps * 1e6)
    facts = {
        "raw_us": round(statistics.median(raw), 2),
        "geartrain_us": round(statistics.median(ours), 2),
        "over_raw_us": round(statistics.median(b - a for a, b in zip(raw, ours, strict=True)), 2),
        "ratio": round(statistics.median(b / a for a, b in zip(raw, ours, strict=True)), 3),
        "session_us": round(statistics.median(session), 2),
        "session_over_raw_us": round(statistics.median(b - a for a, b in zip(raw, session, strict=True)), 2),
        "session_ratio": round(statistics.median(b / a for a, b in zip(raw, session, strict=True)), 3),
        "log": options.log,
        "cpu_time": options.cpu,
        "steps": options.steps,
        "rounds": options.rounds,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
