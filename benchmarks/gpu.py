"""Cost of a step on a GPU: the loop by hand, geartrain, and other trainers that are installed.

``mlp``: a step of five kernels, which the launches of the CPU bound. ``transformer``: two layers in
bf16-mixed. ``cnn``: three convolutions. Their batches are on the GPU. ``prefetch``: batches in
pinned memory, and a network whose step takes about as long as a copy; the loop by hand copies with
``non_blocking=True`` on the compute stream, geartrain copies ahead on a stream of its own.

The trainers alternate in this process, and the median of the rounds counts, so a drift of the
machine's speed affects all equally. ``--json`` names the trainers that are not installed.

    python benchmarks/gpu.py [--what mlp transformer] [--steps 300] [--rounds 9] [--json]

(No file here may be called cuda.py: torch imports NVIDIA's package ``cuda``, and Python searches a
script's folder first.)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from trainers import ON_GPU, TRAINERS, Watch


class Stopwatch(Watch):
    """Measures the steps alone, until the device has finished them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def start(self) -> None:
        self.began = self._now()

    def stop(self) -> None:
        self.seconds = self._now() - self.began


class Batches:
    """A loader. (Lightning takes a list for a list of loaders.)"""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def measure(name: str, steps: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Return µs per step of each trainer, and its ratio to the loop by hand.

    Args:
        name: of the work.
        rounds: in each, all trainers train once; one more round is a warm-up.
    """
    work = replace(ON_GPU[name], device=device)
    steps = max(10, steps // 10) if work.prefetch else steps
    batches = [work.batch() for _ in range(steps)]
    if not work.prefetch:
        batches = [(x.to(device), y.to(device)) for x, y in batches]
    elif device.type == "cuda":
        batches = [(x.pin_memory(), y.pin_memory()) for x, y in batches]
    times: dict[str, list[float]] = {trainer: [] for trainer in TRAINERS}
    absent: dict[str, str] = {}
    for number in range(rounds + 1):
        for trainer, train in TRAINERS.items():
            if trainer in absent:
                continue
            watch = Stopwatch(device)
            try:
                train(work, Batches(batches), watch)
            except ImportError as error:
                absent[trainer] = str(error)
                continue
            if number:
                times[trainer].append(watch.seconds / steps * 1e6)
    hand = times["by hand"]
    facts: dict[str, Any] = {"steps": steps, "rounds": rounds}
    for trainer, each in times.items():
        if each:
            ratios = [a / b for a, b in zip(each, hand, strict=True)]
            facts[trainer] = {
                "us": round(statistics.median(each), 1),
                "ratio": round(statistics.median(ratios), 3),
            }
    return facts | ({"not installed": absent} if absent else {})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", nargs="+", choices=list(ON_GPU), default=list(ON_GPU))
    parser.add_argument("--steps", type=int, default=300, help="of a round; prefetch: a tenth")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            "benchmarks/gpu.py needs a CUDA GPU and a torch built for it; torch "
            f"{torch.__version__} sees none"
        )
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    with contextlib.redirect_stdout(sys.stderr):  # trainers' remarks
        facts = {
            name: measure(name, options.steps, options.rounds, device) for name in options.what
        }
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    versions = f"{card}, torch {torch.__version__}, Python {platform.python_version()}"
    if options.json:
        print(json.dumps(facts | {"machine": versions}, indent=2))
        return
    print(f"{versions}\n\n| µs a step, and its ratio | " + " | ".join(TRAINERS) + " |")
    print("|---" * (1 + len(TRAINERS)) + "|")
    for name, row in facts.items():
        found = [row.get(trainer) for trainer in TRAINERS]
        cells = [f"{one['us']:,}, {one['ratio']:.3f}" if one else "not installed" for one in found]
        print(f"| `{name}`, {row['steps']} steps | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
