"""Networks with their batches, and the trainers that train them: by hand, geartrain, and others.

PyTorch Lightning, Fabric, Accelerate and Ignite are optional: a trainer that is not installed
raises ImportError when it is called. Each returns the network that it has trained.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import geartrain as gt

# --- networks -------------------------------------------------------------------------------------


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


class Graph(nn.Module):
    """Two layers that average over a node's neighbours, as a GCN's."""

    def __init__(self, nodes: int = 256) -> None:
        super().__init__()
        edges = (torch.rand(nodes, nodes) < 0.02).float() + torch.eye(nodes)
        self.register_buffer("mean", edges / edges.sum(1, keepdim=True))
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mean @ self.last(torch.relu(self.mean @ self.first(x)))


class LastState(nn.Module):
    """An LSTM, and a linear layer on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.last = nn.LSTM(32, 64, batch_first=True), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.rnn(x)[0][:, -1])


def mlp(inputs: int = 64, widths: tuple[int, ...] = (64,)) -> nn.Module:
    sizes = (inputs, *widths)
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 10))


def transformer(width: int = 256, layers: int = 2, tokens: int = 256) -> nn.Module:
    blocks = [Attention(width, 4) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(tokens, width), *blocks, nn.Linear(width, tokens))


def cnn() -> nn.Module:
    sizes = [(3, 32), (32, 64), (64, 128)]
    layers = [
        layer
        for a, b in sizes
        for layer in (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10))


def small_cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 16, 10)),
    )


# --- works ----------------------------------------------------------------------------------------


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters)


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Work:
    """A network with its batches.

    Args:
        net: makes the network.
        batch: makes a batch on the CPU.
        optimizer: makes the optimizer.
        precision: of geartrain and Lightning.
        prefetch: the option of geartrain's cuda; 0 for batches on the GPU.
        device: where the network is.
    """

    net: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd
    precision: str = "32-true"
    prefetch: int = 0
    device: torch.device = CPU

    def new_net(self) -> nn.Module:
        """Return the network with the same weights for every trainer."""
        torch.manual_seed(0)
        return self.net()


def classes(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(*shape), torch.randint(0, 10, (shape[0],))


def tokens(batch: int, length: int, kinds: int) -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.randint(0, kinds, (batch, length + 1))
    return text[:, :-1], text[:, 1:]


#: Small enough that a trainer's own work shows.
ON_CPU = {
    "mlp": Work(mlp, partial(classes, 32, 64)),
    "graph": Work(Graph, partial(classes, 256, 32)),
    "cnn": Work(small_cnn, partial(classes, 32, 1, 8, 8)),
    "rnn": Work(LastState, partial(classes, 16, 20, 32)),
    "transformer": Work(partial(transformer, 64, 2, 65), partial(tokens, 8, 32, 65)),
    "gpt": Work(partial(transformer, 128, 4, 65), partial(tokens, 4, 64, 65)),
}
ON_GPU = {
    "mlp": Work(mlp, partial(classes, 32, 64)),
    "transformer": Work(transformer, partial(tokens, 32, 128, 256), precision="bf16-mixed"),
    "cnn": Work(cnn, partial(classes, 128, 3, 32, 32)),
    # 64 MiB a batch
    "prefetch": Work(partial(mlp, 4096, (4096,) * 5), partial(classes, 4096, 4096), prefetch=1),
}


def loss_of(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.flatten(0, -2), y.flatten())


# --- trainers -------------------------------------------------------------------------------------


class Watch:
    """Is told when the steps begin and end."""

    def start(self) -> None:
        """Take the time, after the set-up."""

    def stop(self) -> None:
        """Take the time, before the tear-down."""


def looped(
    work: Work,
    net: nn.Module,
    batches: Iterable[Any],
    watch: Watch,
    optimizer: torch.optim.Optimizer,
    backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward,
    autocast: bool = False,
) -> nn.Module:
    """Train in a loop by hand; a library may have set up its parts."""
    mixed = autocast and work.precision == "bf16-mixed"
    watch.start()
    for x, y in batches:
        x, y = (tensor.to(work.device, non_blocking=True) for tensor in (x, y))
        optimizer.zero_grad()
        with torch.autocast(work.device.type, torch.bfloat16, enabled=mixed):
            loss = loss_of(net(x), y)
        backward(loss)
        optimizer.step()
    watch.stop()
    return net


def by_hand(work: Work, batches: Iterable[Any], watch: Watch) -> nn.Module:
    """Train as a tutorial does."""
    net = work.new_net().to(work.device)
    optimizer = work.optimizer(net.parameters())
    if work.device.type == "cuda":
        return looped(work, net, batches, watch, optimizer, autocast=True)
    watch.start()
    for x, y in batches:
        optimizer.zero_grad()
        loss = loss_of(net(x), y)
        loss.backward()
        optimizer.step()
    watch.stop()
    return net


def by_expert(work: Work, batches: Iterable[Any], watch: Watch) -> nn.Module:
    """Train with a fused optimizer, and without the bookkeeping of ``zero_grad``."""
    net = work.new_net().to(work.device)
    parameters = list(net.parameters())
    optimizer = work.optimizer(parameters)
    for group in optimizer.param_groups:
        group["fused"] = True
    watch.start()
    for x, y in batches:
        for parameter in parameters:
            parameter.grad = None
        loss_of(net(x), y).backward()
        optimizer.step()
    watch.stop()
    return net


def module_of(base: type, work: Work, log: bool = False) -> type:
    """Return the module for a Trainer, ours or Lightning's."""

    class Module(base):
        def __init__(self) -> None:
            super().__init__()
            self.net = work.new_net()

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = loss_of(self.net(x), y)
            if log:
                self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self):
            return work.optimizer(self.parameters())

    return Module


def by_geartrain(
    work: Work,
    batches: Iterable[Any],
    watch: Watch,
    log: bool = False,
    bar: bool = False,
    plugins: tuple[Any, ...] = (),
) -> nn.Module:
    class Times:
        @gt.hookimpl
        def on_run_start(self):
            watch.start()

        @gt.hookimpl
        def on_run_end(self):
            watch.stop()

    on_gpu = work.device.type == "cuda"
    module = module_of(gt.Module, work, log)()
    gt.Trainer(
        accelerator=work.device.type,
        accelerator_options={"prefetch": work.prefetch} if on_gpu else None,
        strategy="single",
        devices=1,
        precision=work.precision,
        max_epochs=1,
        enable_progress_bar=bar,
        plugins=[Times(), *plugins],
    ).fit(module, batches)
    return module.net


def by_session(work: Work, batches: Iterable[Any], watch: Watch) -> nn.Module:
    with gt.Session(accelerator=work.device.type, devices=1, precision=work.precision) as session:
        net = work.new_net()
        model, optimizer = session.setup(net, work.optimizer(net.parameters()))
        looped(work, model, batches, watch, optimizer, session.backward)
    return net


def by_lightning(work: Work, batches: Iterable[Any], watch: Watch, log: bool = False) -> nn.Module:
    import pytorch_lightning as pl

    class Module(module_of(pl.LightningModule, work, log)):
        def on_train_start(self):
            watch.start()

        def on_train_end(self):
            watch.stop()

    module = Module()
    pl.Trainer(
        accelerator="gpu" if work.device.type == "cuda" else "cpu",
        devices=1,
        precision=work.precision,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, batches)
    return module.net


def by_fabric(work: Work, batches: Iterable[Any], watch: Watch) -> nn.Module:
    from lightning_fabric import Fabric

    kind = "gpu" if work.device.type == "cuda" else "cpu"
    fabric = Fabric(accelerator=kind, devices=1, precision=work.precision)
    net = work.new_net()
    model, optimizer = fabric.setup(net, work.optimizer(net.parameters()))
    looped(work, model, batches, watch, optimizer, fabric.backward)
    return net


def by_accelerate(work: Work, batches: Iterable[Any], watch: Watch) -> nn.Module:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # one per process, with one precision
    mixed = "bf16" if work.precision == "bf16-mixed" else "no"
    accelerator = Accelerator(mixed_precision=mixed, cpu=work.device.type == "cpu")
    net = work.new_net()
    model, optimizer = accelerator.prepare(net, work.optimizer(net.parameters()))
    looped(work, model, batches, watch, optimizer, accelerator.backward)
    return net


def by_ignite(work: Work, batches: Iterable[Any], watch: Watch) -> nn.Module:
    from ignite.engine import Engine

    net = work.new_net().to(work.device)
    optimizer = work.optimizer(net.parameters())

    def step(engine: Any, batch: Any) -> torch.Tensor:
        x, y = (tensor.to(work.device, non_blocking=True) for tensor in batch)
        optimizer.zero_grad()
        with torch.autocast(
            work.device.type, torch.bfloat16, enabled=work.precision == "bf16-mixed"
        ):
            loss = loss_of(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    watch.start()
    Engine(step).run(batches)
    watch.stop()
    return net


Trainer = Callable[[Work, Iterable[Any], Watch], nn.Module]
TRAINERS: dict[str, Trainer] = {
    "by hand": by_hand,
    "geartrain": by_geartrain,
    "geartrain.Session": by_session,
    "Lightning": by_lightning,
    "Fabric": by_fabric,
    "Accelerate": by_accelerate,
    "Ignite": by_ignite,
}
