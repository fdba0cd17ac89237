"""One combination of strategy, data, options and ending, and its reference run in one process."""

import os
import signal
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import geartrain as gt
from geartrain.callbacks import EMA, EarlyStopping, ModelCheckpoint
from geartrain.testing import ThreadRanks

FACTORS: dict[str, list[Any]] = {
    "workers": ["0", "2", "2 persistent"],
    "data": ["map", "uneven", "iterable", "graphs"],
    "accumulate": [1, 4],
    "loss": ["mean", "weighted"],
    "precision": ["32-true", "64-true", "bf16-mixed"],
    "callbacks": ["none", "checkpoint", "stopping", "ema", "all"],
    "ending": ["done", "stopped", "error", "killed", "resumed"],
}
#: The number of ranks by strategy. The ranks of ``threads`` share one process.
WORLDS = {"single": 1, "threads": 2, "dp": 1, "ddp": 2, "ddp_spawn": 2, "bagua": 2, "horovod": 2}
#: Endings after which a second run continues from the last checkpoint.
INTERRUPTED = ("error", "killed", "resumed")

EPOCHS, GLOBAL_BATCH, SAMPLES = 3, 4, 24
#: The epoch and the batch in which a run is stopped, raises or is killed: after one checkpoint,
#: inside a window of accumulation.
EPOCH, BATCH = 1, 2
OWN = "the user's own error"
#: Relative tolerances: additions have another order, and bf16-mixed rounds each rank's part.
TOLERANCE = {"32-true": 1e-4, "64-true": 1e-9, "bf16-mixed": 1e-2}


class OwnError(Exception):
    """The error that the user's code raises."""


@dataclass(frozen=True)
class Case:
    """A combination; the names are those of :data:`FACTORS`."""

    strategy: str
    workers: str
    data: str
    accumulate: int
    loss: str
    precision: str
    callbacks: str
    ending: str

    @property
    def id(self) -> str:
        """The values, as the name of a test and of a folder."""
        return "-".join(str(value).replace(" ", "_") for value in asdict(self).values())

    @property
    def world(self) -> int:
        return WORLDS[self.strategy]


# --- data ----------------------------------------------------------------------------------------


@dataclass
class Graphs:
    """A batch of graphs like torch-geometric's: all nodes, and the graph of each node."""

    x: torch.Tensor  # (nodes, 3)
    y: torch.Tensor  # (graphs, 1)
    graph: torch.Tensor  # (nodes,)
    num_graphs: int

    def to(self, device, non_blocking=False):
        return Graphs(*(part.to(device) for part in (self.x, self.y, self.graph)), self.num_graphs)


class Samples(Dataset):
    """Samples by number; graph n has 1 + n % 4 nodes."""

    def __init__(self, numbers, graphs=False):
        self.numbers, self.graphs = list(numbers), graphs

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        return sample(self.numbers[index], self.graphs)


class Stream(IterableDataset):
    """A rank's part of each global batch. Each of n workers yields every n-th part.

    Rank 0 has one batch more than the last rank.
    """

    def __init__(self, rank, size):
        self.rank, self.size, self.batch = rank, size, GLOBAL_BATCH // size
        self.batches = SAMPLES // GLOBAL_BATCH + (rank < size - 1)

    def __iter__(self):
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for number in range(first, self.batches, step):
            start = GLOBAL_BATCH * number + self.batch * self.rank
            yield from (sample(n, False) for n in range(start, start + self.batch))


def sample(number, graph):
    random = torch.Generator().manual_seed(number)
    x = torch.randn(1 + number % 4 if graph else 1, 3, generator=random)
    y = x.mean(dim=0).sum().sin().reshape(1)
    return (x, y) if graph else (x[0], y)


def collate_graphs(items):
    sizes = torch.tensor([len(x) for x, _ in items])
    graph = torch.arange(len(items)).repeat_interleave(sizes)
    return Graphs(
        torch.cat([x for x, _ in items]), torch.stack([y for _, y in items]), graph, len(items)
    )


# --- the module ----------------------------------------------------------------------------------


class Model(gt.Module):
    """A regression whose training ends as the case requires.

    Args:
        reference: train in one process, without loader workers and without an event, on the samples
            that all ranks of the case get together.
    """

    def __init__(self, case, event, reference=False):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.case, self.event, self.reference = case, event, reference

    def _loader(self, data, batch):
        workers = 0 if self.reference else int(self.case.workers[0])
        persistent = bool(workers) and self.case.workers.endswith("persistent")
        collate = collate_graphs if self.case.data == "graphs" else None
        return DataLoader(
            data, batch, num_workers=workers, persistent_workers=persistent, collate_fn=collate
        )

    def train_dataloader(self):
        world = 1 if self.reference else self.case.world
        if self.case.data == "iterable":
            return self._loader(Stream(self.trainer.global_rank, world), GLOBAL_BATCH // world)
        numbers = list(range(SAMPLES - (self.case.data == "uneven")))
        if self.reference:
            # Ranks have equal numbers of samples, so the sampler repeats the first ones.
            numbers += numbers[: -len(numbers) % self.case.world]
        return self._loader(Samples(numbers, self.case.data == "graphs"), GLOBAL_BATCH // world)

    def val_dataloader(self):
        # Ranks have unequal numbers of samples and unequal last batches.
        return self._loader(Samples(range(SAMPLES, SAMPLES + 11), self.case.data == "graphs"), 3)

    def errors(self, batch):
        """Return the squared error of each sample, (samples,)."""
        if not isinstance(batch, Graphs):
            x, y = batch
            return (self.net(x) - y).square().squeeze(1)
        nodes = self.net(batch.x.to(self.net[0].weight.dtype))
        graphs = torch.zeros(batch.num_graphs, 1, dtype=nodes.dtype)
        graphs = graphs.index_reduce(0, batch.graph, nodes, "mean", include_self=False)
        return (graphs - batch.y).square().squeeze(1)

    def training_step(self, batch, batch_idx):
        if (
            self.event
            and (self.trainer.current_epoch, batch_idx) == (EPOCH, BATCH)
            and self.is_last_rank()
        ):
            if self.event == "stopped":
                self.trainer.should_stop = True
            if self.event == "error":
                raise OwnError(OWN)
            if self.event == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
        errors = self.errors(batch)
        loss = errors.mean()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return (
            {"loss": errors.sum(), "weight": len(errors)} if self.case.loss == "weighted" else loss
        )

    def is_last_rank(self):
        return self.trainer.global_rank == self.trainer.world_size - 1

    def validation_step(self, batch, batch_idx):
        errors = self.errors(batch)
        self.log("val_loss", errors.mean(), sync_dist=True)
        self.log("samples", float(len(errors)), reduce_fx="sum", sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


# --- the runs ------------------------------------------------------------------------------------


def train(case, folder, part, reference=False):
    """Train and return a rank's weights, metrics and counters at the end.

    Args:
        part: 1: until the event of the case, or the end; 2: from the last checkpoint to the end.
    """
    callbacks = {
        "checkpoint": ModelCheckpoint(
            monitor="val_loss", save_top_k=2, dirpath=folder / "checkpoints"
        ),
        # val_loss falls, so the second epoch is the last.
        "stopping": EarlyStopping(monitor="val_loss", mode="max", patience=1),
        "ema": EMA(decay=0.8),
    }
    chosen = {name: one for name, one in callbacks.items() if case.callbacks in (name, "all")}
    own = ThreadRanks(2) if case.strategy == "threads" else case.strategy
    # By default horovod multiplies learning rates by the number of ranks.
    scales = case.strategy == "horovod" and not reference
    trainer = gt.Trainer(
        accelerator="cpu",
        strategy="single" if reference else own,
        strategy_options={"scale_lr": False} if scales else None,
        devices=1 if reference or case.strategy == "single" else 2,
        precision=case.precision,
        accumulate_grad_batches=case.accumulate,
        max_epochs=1 if part == 1 and case.ending == "resumed" and not reference else EPOCHS,
        callbacks=list(chosen.values()),
        output=folder,
        seed=1,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
    )
    if reference:
        happens = case.ending == "stopped"
    else:
        happens = part == 1 and case.ending in ("stopped", "error", "killed")
    model = Model(case, case.ending if happens else "", reference)
    trainer.fit(model, ckpt_path="last" if part == 2 else None)
    metrics = dict(trainer.callback_metrics)
    if "checkpoint" in chosen:
        metrics["best score"] = chosen["checkpoint"].best_model_score
    counters = [
        trainer.global_step,
        trainer.current_epoch,
        chosen["stopping"].stopped_epoch if "stopping" in chosen else None,
    ]
    return {
        "rank": trainer.global_rank,
        "weights": model.state_dict(),
        "metrics": metrics,
        "counters": counters,
    }


def differences(case, found, expected):
    """Return the differences between a rank's results and those of one process, in words."""
    tolerance = TOLERANCE[case.precision]
    close = partial(torch.allclose, rtol=tolerance, atol=tolerance)
    wrong = [
        name for name, one in expected["weights"].items() if not close(found["weights"][name], one)
    ]
    if found["counters"] != expected["counters"]:
        wrong.append(f"counters: {found['counters']}, in one process {expected['counters']}")
    for name in expected["metrics"].keys() | found["metrics"].keys():
        numbers = [
            torch.tensor(float(has["metrics"].get(name, "nan"))) for has in (found, expected)
        ]
        if not close(*numbers):
            wrong.append(f"{name}: {numbers[0]}, in one process {numbers[1]}")
    return wrong


def unexpected_files(folder):
    """Return the files of a run's folder that are not for the user."""
    known = {"plan.json", "metrics.jsonl", "summary.json", "last.ckpt", "checkpoints", "logs"}
    known.add("provenance.jsonl")
    found = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return sorted(
        str(path)
        for path in found
        if path.parts[0] not in known or path.suffix not in (".json", ".jsonl", ".ckpt", ".log")
    )
