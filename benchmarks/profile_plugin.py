"""Cost of the plugin profile: step time with the plugin over step time without it.

The loop of overhead.py: MLP 64-WIDTH-10, batch 32, SGD, pre-batched data, one thread, CPU. Runs
with and without the plugin alternate in this process, and their order changes each round. Each
round gives a ratio of wall time and one of CPU time, which other programs disturb less; the median
round counts. The trace is off: its steps are not in the table.

    python benchmarks/profile_plugin.py [--steps 1000] [--rounds 25] [--width 64]
"""

from __future__ import annotations

import argparse
import json
import warnings
from contextlib import redirect_stdout
from io import StringIO

import torch
from overhead import MLP, Stopwatch, compare

import geartrain as gt
from geartrain_monitor.profile import Profile


def run(batches, width: int, plugins) -> tuple[float, float]:
    """Return the seconds of the steps: wall time and CPU time."""
    watch = Stopwatch()
    trainer = gt.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        enable_progress_bar=False,
        plugins=[watch, *plugins],
    )
    with redirect_stdout(StringIO()):
        trainer.fit(MLP(width), batches)
    return watch.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # the run has no folder
    torch.set_num_threads(1)
    batches = [(torch.randn(32, 64), torch.randint(10, (32,))) for _ in range(options.steps)]
    without, with_it = [], []
    for number in range(options.rounds + 1):
        kinds = [(without, []), (with_it, [Profile(trace=False)])]
        for times, plugins in kinds if number % 2 else reversed(kinds):
            seconds = run(batches, options.width, plugins)
            if number:  # the first round warms up
                times.append(tuple(1e6 * each / options.steps for each in seconds))
    step_us = sorted(wall for wall, _ in without)[options.rounds // 2]
    facts: dict[str, object] = {"step_us": round(step_us, 1), "torch": torch.__version__}
    least = [min(wall for wall, _ in times) for times in (without, with_it)]
    facts["least_us"] = [round(each, 1) for each in least]  # of the quietest round of each
    facts |= {name: compare(without, with_it, i) for i, name in enumerate(("wall", "cpu"))}
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
