"""Cost of the loop over a hand-written loop, in µs per step, and of the bar on a terminal.

MLP 64-64-10, batch 32, cross-entropy, SGD, pre-batched data, one thread, CPU. The loops alternate
in this process, and the median round counts, so a drift of the machine's speed affects all equally.
``session`` is the hand-written loop with a Session. ``--width 4000`` makes a step of about 1 ms.
``--adam`` trains with Adam in every loop, ``--fast`` adds the plugin fast to geartrain's.

    python benchmarks/overhead.py [--steps 1000] [--rounds 15] [--width 64] [--log] [--bar]
                                  [--adam] [--fast]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import torch
from torch import nn
from torch.nn import functional

import geartrain as gt


def make_optimizer(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def make_net(width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


class MLP(gt.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.net = make_net(width)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return make_optimizer(self.parameters())


class LoggingMLP(MLP):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True)
        return loss


class Stopwatch:
    """Measure the steps alone, without set-up and tear-down: wall time and CPU time in seconds."""

    @gt.hookimpl
    def on_run_start(self):
        self.start = now()

    @gt.hookimpl
    def on_run_end(self):
        self.seconds = since(self.start)


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def since(start: tuple[float, float]) -> tuple[float, float]:
    wall, cpu = now()
    return wall - start[0], cpu - start[1]


def raw_loop(batches, width: int = 64) -> tuple[float, float]:
    net = make_net(width)
    optimizer = make_optimizer(net.parameters())
    start = now()
    for x, y in batches:
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
    return since(start)


def geartrain_loop(batches, log: bool, bar: bool, width: int, plugins) -> tuple[float, float]:
    watch = Stopwatch()
    trainer = gt.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        enable_progress_bar=bar,
        plugins=[watch, *plugins],
    )
    trainer.fit(LoggingMLP(width) if log else MLP(width), batches)
    return watch.seconds


def session_loop(batches, width: int = 64) -> tuple[float, float]:
    with gt.Session(accelerator="cpu", devices=1) as session:
        net = make_net(width)
        net, optimizer = session.setup(net, make_optimizer(net.parameters()))
        loader = session.setup_dataloaders(batches)
        start = now()
        for x, y in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(x), y)
            session.backward(loss)
            optimizer.step()
        return since(start)


@contextmanager
def terminal():
    """A pseudo-terminal as standard output and error; another process reads it."""
    ours, theirs = os.openpty()
    with subprocess.Popen(
        ["cat"], stdin=ours, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as reader:
        os.close(ours)
        with os.fdopen(theirs, "w") as stream, redirect_stdout(stream), redirect_stderr(stream):
            assert stream.isatty()
            yield
        reader.kill()


def compare(
    a: list[tuple[float, float]], b: list[tuple[float, float]], which: int
) -> dict[str, object]:
    """Return how much longer ``b`` took in each round: in µs, and as a ratio with quartiles."""
    ratios = [y[which] / x[which] for x, y in zip(a, b, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    more = statistics.median(y[which] - x[which] for x, y in zip(a, b, strict=True))
    return {
        "more_us": round(more, 2),
        "ratio": round(middle, 4),
        "quartiles": [round(low, 4), round(high, 4)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--log", action="store_true", help="one self.log a step")
    parser.add_argument("--bar", action="store_true", help="with the bar on a terminal too")
    parser.add_argument("--adam", action="store_true", help="Adam in every loop")
    parser.add_argument("--fast", action="store_true", help="geartrain with the plugin fast")
    options = parser.parse_args()
    if options.adam:
        global make_optimizer
        make_optimizer = torch.optim.Adam
    plugins = ["fast"] * options.fast
    os.environ.update(TERM="xterm-256color", COLUMNS="120")
    torch.set_num_threads(1)
    batches = [(torch.randn(32, 64), torch.randint(0, 10, (32,))) for _ in range(options.steps)]
    raw, session, without, with_bar = [], [], [], []
    for _ in range(options.rounds + 1):
        raw.append(raw_loop(batches, options.width))
        session.append(session_loop(batches, options.width))
        without.append(geartrain_loop(batches, options.log, False, options.width, plugins))
        if options.bar:
            with terminal():
                with_bar.append(geartrain_loop(batches, options.log, True, options.width, plugins))
    # Per step, in µs; the first round is a warm-up.
    raw, session, without, with_bar = (
        [tuple(s / options.steps * 1e6 for s in round_) for round_ in rounds[1:]]
        for rounds in (raw, session, without, with_bar)
    )
    facts = {
        "raw_us": round(statistics.median(wall for wall, _ in raw), 2),
        "geartrain_us": round(statistics.median(wall for wall, _ in without), 2),
        "over_raw": compare(raw, without, 0),
        "session_over_raw": compare(raw, session, 0),
        "session_over_raw_in_cpu_time": compare(raw, session, 1),
    }
    if options.bar:
        facts |= {
            "with_bar_over_raw": compare(raw, with_bar, 0),
            "bar_over_no_bar": compare(without, with_bar, 0),
            "bar_over_no_bar_in_cpu_time": compare(without, with_bar, 1),
        }
    facts |= {**vars(options), "torch": torch.__version__, "python": platform.python_version()}
    json.dump(facts, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
