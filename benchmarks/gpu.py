"""Cost of the loop on a GPU, and gain from copying batches ahead of the step. Needs a GPU.

``overhead``: an MLP on batches that are already on the GPU; geartrain's loop against a hand-written
loop, in µs per step.

``prefetch``: batches from a DataLoader whose workers pin them, and a network whose step takes about
as long as a copy. The hand-written loop copies with ``non_blocking=True`` on the compute stream;
geartrain copies ahead on a separate stream.

(No file here may be called cuda.py: torch imports NVIDIA's package ``cuda``, and Python searches a
script's folder first.)

Both loops alternate in this process, and the median round counts, so a drift of the machine's speed
affects both equally.

    python benchmarks/gpu.py [--steps 500] [--rounds 11] [--what overhead,prefetch] [--megabytes 64]

It needs geartrain, geartrain-cuda and their requirements (pluggy, importlib-metadata, packaging,
nvidia-ml-py). If they are not installed, set
``PYTHONPATH=core/src:plugins/accelerators/cuda/src``; the accelerator is then given as an object,
without entry points.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

DEVICE = torch.device("cuda", 0)


def make_net(features: int = 64, width: int = 64, depth: int = 1) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(features, width), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def make_module(net):
    import geartrain as gt

    class Classifier(gt.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch, batch_idx):
            x, y = batch
            return functional.cross_entropy(self.net(x), y)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Classifier()


def stopwatch():
    import geartrain as gt

    class Stopwatch:
        """Measure the steps alone, until the GPU has finished them."""

        @gt.hookimpl
        def on_run_start(self):
            torch.cuda.synchronize()
            self.start = time.perf_counter()

        @gt.hookimpl
        def on_run_end(self):
            torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self.start

    return Stopwatch()


def by_hand(net, batches) -> float:
    """Return the seconds of the hand-written loop."""
    net.to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for x, y in batches:
        x, y = x.to(DEVICE, non_blocking=True), y.to(DEVICE, non_blocking=True)
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def by_geartrain(net, batches, prefetch: int) -> float:
    """Return the seconds of geartrain's loop."""
    import geartrain as gt
    from geartrain.builtin.single import SingleDeviceStrategy
    from geartrain_cuda import CUDAAccelerator

    watch = stopwatch()
    trainer = gt.Trainer(
        accelerator=CUDAAccelerator(prefetch=prefetch),
        strategy=SingleDeviceStrategy(),
        devices=[0],
        max_epochs=1,
        enable_progress_bar=False,
        log_every_n_steps=1_000_000,
        plugins=[watch],
    )
    trainer.fit(make_module(net), batches)
    return watch.seconds


class Images(Dataset):
    """Samples that cost the worker nothing, so that only the copy is measured."""

    def __init__(self, samples: int, features: int) -> None:
        self.samples, self.x = samples, torch.randn(features)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int):
        return self.x, index % 10


def compare(rounds: int, steps: int, first, second) -> tuple[list[float], list[float]]:
    """Return µs per step of both loops for each round; the first round is a warm-up."""
    a, b = [], []
    for number in range(rounds + 1):
        pair = first(), second()
        if number:
            a.append(pair[0] / steps * 1e6)
            b.append(pair[1] / steps * 1e6)
    return a, b


def figures(by_hand_us: list[float], ours_us: list[float]) -> dict[str, float]:
    pairs = list(zip(by_hand_us, ours_us, strict=True))
    return {
        "by_hand_us": round(statistics.median(by_hand_us), 2),
        "geartrain_us": round(statistics.median(ours_us), 2),
        "difference_us": round(statistics.median(b - a for a, b in pairs), 2),
        "ratio": round(statistics.median(b / a for a, b in pairs), 4),
    }


def overhead(options) -> dict[str, float]:
    batches = [
        (torch.randn(32, 64, device=DEVICE), torch.randint(0, 10, (32,), device=DEVICE))
        for _ in range(options.steps)
    ]
    return figures(
        *compare(
            options.rounds,
            options.steps,
            lambda: by_hand(make_net(), batches),
            lambda: by_geartrain(make_net(), batches, 0),
        )
    )


def prefetching(options) -> dict[str, float]:
    features, batch = 4096, max(1, options.megabytes * 2**20 // (4 * 4096))
    steps = max(20, options.steps // 10)
    images = Images(batch * steps, features)
    data = DataLoader(images, batch_size=batch, num_workers=options.workers, pin_memory=True)
    # Keep batches: the comparison is of copying, not of workers, which are equal in both loops.
    batches = list(data)

    def net():
        return make_net(features, 4096, options.depth)

    by_hand_us, ours_us = compare(
        options.rounds,
        steps,
        lambda: by_hand(net(), batches),
        lambda: by_geartrain(net(), batches, 1),
    )
    return {**figures(by_hand_us, ours_us), "steps": steps, "megabytes_a_batch": options.megabytes}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--what", default="overhead,prefetch")
    parser.add_argument("--megabytes", type=int, default=64, help="of one batch, for prefetch")
    parser.add_argument(
        "--depth",
        type=int,
        default=4,
        help="hidden layers, for prefetch: more make a step longer than a copy",
    )
    parser.add_argument("--workers", type=int, default=0, help="of the DataLoader, for prefetch")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(
            "benchmarks/gpu.py needs a CUDA GPU and a torch built for it; torch "
            f"{torch.__version__} sees none"
        )
    measures = {"overhead": overhead, "prefetch": prefetching}
    unknown = set(options.what.split(",")) - set(measures)
    if unknown:
        sys.exit(f"--what {options.what}: known are {', '.join(measures)}")
    facts = {name: measures[name](options) for name in options.what.split(",")}
    facts |= {
        "steps": options.steps,
        "rounds": options.rounds,
        "gpu": torch.cuda.get_device_name(DEVICE),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
