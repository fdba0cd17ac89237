"""Cost of a step on a GPU: the loop by hand, geartrain, and other trainers that are installed.

``mlp``: a step of five kernels, which the launches of the CPU bound. ``transformer``: two layers in
bf16-mixed. ``cnn``: three convolutions. Their batches are on the GPU. ``prefetch``: batches in
pinned memory, and a network whose step takes about as long as a copy; the loop by hand copies with
``non_blocking=True`` on the compute stream, geartrain copies ahead on a stream of its own.

The trainers alternate in this process, and the median of the rounds counts, so a drift of the
machine's speed affects all equally. Beside geartrain: PyTorch Lightning, Fabric and Accelerate;
``--json`` names those that are not installed.

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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import geartrain as gt


class Attention(nn.Module):
    """A layer of a transformer, as nanoGPT's."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.second(x))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def transformer() -> nn.Module:
    width = 256
    layers = [Attention(width, 4) for _ in range(2)]
    return nn.Sequential(nn.Embedding(256, width), *layers, nn.Linear(width, 256))


def cnn() -> nn.Module:
    sizes = [(3, 32), (32, 64), (64, 128)]
    layers = [
        layer
        for a, b in sizes
        for layer in (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10))


def wide() -> nn.Module:
    widths = [4096] * 5
    layers = [layer for width in widths for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(4096, 10))


@dataclass(frozen=True)
class Work:
    """A network with its batches.

    Args:
        net: makes the network.
        batch: makes a batch on the CPU.
        precision: of geartrain and Lightning.
        prefetch: the accelerator's option; 0 for batches on the GPU.
    """

    net: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    precision: str = "32-true"
    prefetch: int = 0


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.randint(0, 256, (32, 129))
    return text[:, :-1], text[:, 1:]


WORKS = {
    "mlp": Work(mlp, lambda: (torch.randn(32, 64), torch.randint(0, 10, (32,)))),
    "transformer": Work(transformer, tokens, "bf16-mixed"),
    "cnn": Work(cnn, lambda: (torch.randn(128, 3, 32, 32), torch.randint(0, 10, (128,)))),
    "prefetch": Work(  # 64 MiB
        wide, lambda: (torch.randn(4096, 4096), torch.randint(0, 10, (4096,))), prefetch=1
    ),
}


def loss_of(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.flatten(0, -2), y.flatten())


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.01)


class Watch:
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


def looped(
    work: Work,
    net: nn.Module,
    batches: Iterable[Any],
    watch: Watch,
    optimizer: torch.optim.Optimizer,
    backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward,
    autocast: bool = False,
) -> None:
    """Train in a loop by hand; a library may have set up its parts."""
    mixed = autocast and work.precision == "bf16-mixed"
    watch.start()
    for x, y in batches:
        x, y = (tensor.to(watch.device, non_blocking=True) for tensor in (x, y))
        optimizer.zero_grad()
        with torch.autocast(watch.device.type, torch.bfloat16, enabled=mixed):
            loss = loss_of(net(x), y)
        backward(loss)
        optimizer.step()
    watch.stop()


def by_hand(work: Work, batches: Iterable[Any], watch: Watch) -> None:
    net = work.net().to(watch.device)
    looped(work, net, batches, watch, sgd(net), autocast=True)


def module_of(base: type, work: Work) -> type:
    """Return the module for a Trainer, ours or Lightning's."""

    class Module(base):
        def __init__(self) -> None:
            super().__init__()
            self.net = work.net()

        def training_step(self, batch, batch_idx):
            x, y = batch
            return loss_of(self.net(x), y)

        def configure_optimizers(self):
            return sgd(self)

    return Module


def by_geartrain(work: Work, batches: Iterable[Any], watch: Watch) -> None:
    class Times:
        @gt.hookimpl
        def on_run_start(self):
            watch.start()

        @gt.hookimpl
        def on_run_end(self):
            watch.stop()

    on_gpu = watch.device.type == "cuda"
    gt.Trainer(
        accelerator=watch.device.type,
        accelerator_options={"prefetch": work.prefetch} if on_gpu else None,
        strategy="single",
        devices=1,
        precision=work.precision,
        max_epochs=1,
        enable_progress_bar=False,
        log_every_n_steps=1_000_000,
        plugins=[Times()],
    ).fit(module_of(gt.Module, work)(), batches)


def by_session(work: Work, batches: Iterable[Any], watch: Watch) -> None:
    with gt.Session(accelerator=watch.device.type, devices=1, precision=work.precision) as session:
        net = work.net()
        model, optimizer = session.setup(net, sgd(net))
        looped(work, model, batches, watch, optimizer, session.backward)


def by_lightning(work: Work, batches: Iterable[Any], watch: Watch) -> None:
    import pytorch_lightning as pl

    class Module(module_of(pl.LightningModule, work)):
        def on_train_start(self):
            watch.start()

        def on_train_end(self):
            watch.stop()

    pl.Trainer(
        accelerator="gpu" if watch.device.type == "cuda" else "cpu",
        devices=1,
        precision=work.precision,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), batches)


def by_fabric(work: Work, batches: Iterable[Any], watch: Watch) -> None:
    from lightning_fabric import Fabric

    kind = "gpu" if watch.device.type == "cuda" else "cpu"
    fabric = Fabric(accelerator=kind, devices=1, precision=work.precision)
    net = work.net()
    model, optimizer = fabric.setup(net, sgd(net))
    looped(work, model, batches, watch, optimizer, fabric.backward)


def by_accelerate(work: Work, batches: Iterable[Any], watch: Watch) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # one per process, with one precision
    mixed = "bf16" if work.precision == "bf16-mixed" else "no"
    accelerator = Accelerator(mixed_precision=mixed, cpu=watch.device.type == "cpu")
    net = work.net()
    model, optimizer = accelerator.prepare(net, sgd(net))
    looped(work, model, batches, watch, optimizer, accelerator.backward)


TRAINERS = {
    "by hand": by_hand,
    "geartrain": by_geartrain,
    "geartrain.Session": by_session,
    "Lightning": by_lightning,
    "Fabric": by_fabric,
    "Accelerate": by_accelerate,
}


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
    work = WORKS[name]
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
            watch = Watch(device)
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
    parser.add_argument("--what", nargs="+", choices=list(WORKS), default=list(WORKS))
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
