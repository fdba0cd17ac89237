"""explain --memory against real runs: each rank's peak memory, and the bytes that it sends.

Twelve models, each under single, ddp, fsdp and ddp_sharded on two ranks, on the CPU. The measured
memory is the peak of a rank's resident memory above that before the model was made, the larger of
the ranks. The measured bytes are those of the loopback interface, in a network namespace of their
own, per optimizer step and rank. Needs root and iproute2; other work does not disturb it.

    python benchmarks/estimates.py [--models MLP GPT] [--strategies ddp fsdp]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import geartrain as gt

STEPS = 4
STRATEGIES = {"single": 1, "ddp": 2, "fsdp": 2, "ddp_sharded": 2}


class Base(gt.Module):
    """What the models have in common.

    Args:
        scale: of the sizes; below 1 for the run that loads libraries.
    """

    batch: tuple[int, ...] = (16, 1600)
    accumulate = 1

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.make(lambda size: max(8, int(size * scale)))

    def make(self, n: Any) -> None:
        raise NotImplementedError

    def data(self) -> Any:
        """Return one batch."""
        first, *sizes = self.batch
        return torch.randn(first, *(max(8, int(size * self.scale)) for size in sizes))

    def forward(self, batch: Any) -> Any:
        return self.net(batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch).square().mean()

    def train_dataloader(self) -> Any:
        return Batches(self)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-5)


class Batches:
    """Makes each batch when it is asked for, because data are not predicted."""

    def __init__(self, module: Base) -> None:
        self.module = module

    def __len__(self) -> int:
        return STEPS * self.module.accumulate

    def __iter__(self) -> Any:
        return (self.module.data() for _ in range(len(self)))


class MLP(Base):
    def make(self, n: Any) -> None:
        self.net = nn.Sequential(*[nn.Linear(n(1600), n(1600)) for _ in range(6)])


class LargeBatch(Base):
    batch = (4000, 1000)

    def make(self, n: Any) -> None:
        layers = [(nn.Linear(n(1000), n(1000)), nn.GELU()) for _ in range(4)]
        self.net = nn.Sequential(*[layer for pair in layers for layer in pair])


class Accumulated(MLP):
    accumulate = 4


class Momentum(MLP):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-5, momentum=0.9)


class Autoencoder(Base):
    batch = (256, 4096)

    def make(self, n: Any) -> None:
        sizes = [n(size) for size in (4096, 1024, 256, 1024, 4096)]
        pairs = itertools.pairwise(sizes)
        layers = [layer for a, b in pairs for layer in (nn.Linear(a, b), nn.ReLU())]
        self.net = nn.Sequential(*layers[:-1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return functional.mse_loss(self(batch), batch)


class CNN(Base):
    batch = (16, 48, 48)

    def make(self, n: Any) -> None:
        sizes = [3, n(128), n(256), n(512)]
        pairs = itertools.pairwise(sizes)
        convs = [
            layer
            for a, b in pairs
            for layer in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        ]
        head = [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(sizes[-1] * 16, n(1024))]
        self.net = nn.Sequential(*convs, *head, nn.ReLU(), nn.Linear(n(1024), 10))

    def data(self) -> Any:
        side = max(16, int(48 * self.scale))
        return torch.randn(16, 3, side, side)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        layers = [
            layer
            for _ in range(2)
            for layer in (nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels))
        ]
        self.net = nn.Sequential(layers[0], layers[1], nn.ReLU(), layers[2], layers[3])

    def forward(self, x: Any) -> Any:
        return functional.relu(x + self.net(x))


class ResNet(CNN):
    def make(self, n: Any) -> None:
        width = n(512)
        stem = [nn.Conv2d(3, width, 5, stride=4), nn.BatchNorm2d(width), nn.ReLU()]
        blocks = [Residual(width) for _ in range(3)]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]
        self.net = nn.Sequential(*stem, *blocks, *head)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        qkv = self.qkv(self.first(x)).view(batch, length, 3, 8, width // 8).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.second(x))


class GPT(Base):
    def make(self, n: Any) -> None:
        self.words, width = n(8000), 8 * n(64)
        self.embedding = nn.Embedding(self.words, width)
        self.position = nn.Parameter(torch.zeros(128, width))
        self.blocks = nn.Sequential(*[Block(width) for _ in range(4)])
        self.head = nn.Linear(width, self.words, bias=False)
        self.head.weight = self.embedding.weight

    def data(self) -> Any:
        return torch.randint(0, self.words, (4, 129))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch[:, :-1], batch[:, 1:]
        logits = self.head(self.blocks(self.embedding(x) + self.position[: x.shape[1]]))
        return functional.cross_entropy(logits.flatten(0, 1), y.flatten())


class Encoder(Base):
    def make(self, n: Any) -> None:
        self.width = 8 * n(64)
        layer = nn.TransformerEncoderLayer(self.width, 8, 4 * self.width, batch_first=True)
        self.net = nn.TransformerEncoder(layer, 5, enable_nested_tensor=False)

    def data(self) -> Any:
        return torch.randn(8, 64, self.width)


class LSTM(Base):
    def make(self, n: Any) -> None:
        self.width = n(512)
        self.net = nn.LSTM(self.width, 2 * self.width, 2, batch_first=True)
        self.head = nn.Linear(2 * self.width, self.width)

    def data(self) -> Any:
        return torch.randn(16, 32, self.width)

    def forward(self, batch: Any) -> Any:
        return self.head(self.net(batch)[0])


class GCN(Base):
    def make(self, n: Any) -> None:
        self.width = n(1500)
        self.layers = nn.ModuleList([nn.Linear(self.width, self.width) for _ in range(4)])

    def data(self) -> Any:
        return torch.randn(1000, self.width), torch.randint(0, 1000, (2, 4000))

    def forward(self, batch: Any) -> Any:
        x, (source, target) = batch
        for layer in self.layers:
            x = torch.zeros_like(x).index_add(0, target, layer(x)[source]).relu()
        return x


class Embeddings(Base):
    def make(self, n: Any) -> None:
        self.count = n(12000)
        self.tables = nn.ModuleList([nn.Embedding(self.count, 256) for _ in range(4)])
        self.head = nn.Sequential(nn.Linear(1024, n(1024)), nn.ReLU(), nn.Linear(n(1024), 1))

    def data(self) -> Any:
        return torch.randint(0, self.count, (512, 4))

    def forward(self, batch: Any) -> Any:
        rows = [table(batch[:, i]) for i, table in enumerate(self.tables)]
        return self.head(torch.cat(rows, 1))


class Tiny(Base):
    """Shows what a run needs beside tensors; it is only in the table if it is named."""

    def make(self, n: Any) -> None:
        self.net = nn.Linear(n(1600), 1)


MODELS = [
    *(MLP, LargeBatch, Accumulated, Momentum, Autoencoder, CNN, ResNet, GPT, Encoder, LSTM, GCN),
    Embeddings,
]


# --- in each rank ---------------------------------------------------------------------------------


def resident(name: str) -> float:
    """Return a line of /proc/self/status in MiB."""
    with open("/proc/self/status") as status:
        (line,) = [line for line in status if line.startswith(name)]
    return int(line.split()[1]) / 1024


def sent_bytes() -> int:
    """Return the bytes that the loopback interface of this network namespace has sent."""
    (line,) = [x for x in Path("/proc/net/dev").read_text().splitlines() if x.strip()[:3] == "lo:"]
    return int(line.split()[9])


class Meter:
    """Prints the peaks of all ranks, and the bytes of a step."""

    before = 0.0
    first = 0

    @gt.hookimpl
    def on_train_start(self, run: gt.Run) -> None:
        run.hooks.barrier(run=run)
        self.first = sent_bytes()

    @gt.hookimpl
    def on_train_end(self, run: gt.Run) -> None:
        run.hooks.barrier(run=run)
        sent = (sent_bytes() - self.first) / STEPS / run.world.size
        peak = torch.tensor([resident("VmHWM") - self.before], dtype=torch.float64)
        table = run.hooks.log_sync(run=run, values=peak)
        if run.world.rank == 0:  # the output of others is in files
            print("MEASURED", json.dumps([table[:, 0].tolist(), sent]), flush=True)


def measure(name: str, strategy: str) -> None:
    """Train, in this rank."""
    import torch.distributed.fsdp  # noqa: F401

    cls = globals()[name]
    small = cls(0.05)  # so that libraries are loaded, and their code is compiled
    optimizer = small.configure_optimizers()
    for _ in range(2):
        small.training_step(small.data(), 0).backward()
        optimizer.step()
    del small, optimizer
    meter = Meter()
    trainer = gt.Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=STRATEGIES[strategy],
        plugins=[meter],
        max_epochs=1,
        accumulate_grad_batches=cls.accumulate,
        enable_progress_bar=False,
        use_distributed_sampler=False,
    )
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
    meter.before = resident("VmRSS")
    trainer.fit(cls())


# --- the table ------------------------------------------------------------------------------------


def run(command: list[str]) -> str:
    # Each tensor has its own pages, which are returned when it is freed.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=3600, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def compared(name: str, strategy: str) -> dict[str, Any]:
    """Return the estimate and the measurement of a model under a strategy, and their ratios."""
    command = [str(Path(sys.executable).with_name("geartrain")), "explain", f"{__file__}:{name}"]
    command += ["--memory", "--json", "--accelerator", "cpu", "--strategy", strategy]
    command += ["--devices", str(STRATEGIES[strategy])]
    command += ["--accumulate-grad-batches", str(globals()[name].accumulate)]
    estimate = json.loads(run(command))["memory"]
    inside = f"ip link set lo up && exec {sys.executable} {__file__} --measure {name} {strategy}"
    printed = run(["unshare", "-n", "sh", "-c", inside])
    peaks, sent = json.loads(printed.rpartition("MEASURED ")[2].splitlines()[0])
    mib = estimate["peak"] / 2**20
    facts = {
        "estimated MiB": round(mib, 1),
        "measured MiB": round(max(peaks), 1),
        "ratio": round(mib / max(peaks), 3),
    }
    if STRATEGIES[strategy] > 1:
        facts["estimated bytes"], facts["counted bytes"] = estimate["sent_per_step"], round(sent)
        facts["ratio of bytes"] = round(estimate["sent_per_step"] / sent, 3)
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=[cls.__name__ for cls in MODELS])
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--measure", nargs=2, metavar=("MODEL", "STRATEGY"))
    given = parser.parse_args()
    if given.measure:
        measure(*given.measure)
        return
    ratios: dict[str, list[float]] = {"ratio": [], "ratio of bytes": []}
    columns = ["model", "strategy", "estimated MiB", "measured", "ratio"]
    print("|", " | ".join([*columns, "estimated bytes", "counted", "ratio"]), "|")
    print("|---|---|--:|--:|--:|--:|--:|--:|")
    for name in given.models:
        for strategy in given.strategies:
            facts = compared(name, strategy)
            print("|", " | ".join(map(str, [name, strategy, *facts.values()])), "|", flush=True)
            for key, values in ratios.items():
                values += [facts[key]] if key in facts else []
    for key, values in ratios.items():
        if values:
            worst = max(values, key=lambda value: abs(math.log(value)))
            print(f"{key}: {min(values)} to {max(values)}, the worst {worst}")
    print(f"torch {torch.__version__}")


if __name__ == "__main__":
    main()
