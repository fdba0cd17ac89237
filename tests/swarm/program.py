"""Make a program of a draw (its module, data and trainer), and run it."""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import data

import geartrain as gt
import geartrain_elastic.starter
import geartrain_spawn.starter
from geartrain.testing import ThreadRanks

from ..combinations.case import Stream, sample
from . import pools

EPOCHS, SAMPLES, BATCH = 3, 16, 4
#: Exit code of a rank that the draw kills.
KILLED = 77


@dataclass(frozen=True)
class Draw:
    """A program and a border; each default is the simplest value."""

    border: str = "killed"
    strategy: str = "single"
    #: The strategy, or the number of ranks, on the other side of the border.
    other: str = "single"
    precision: str = "32-true"
    optimizer: str = "SGD"
    scheduler: str = ""
    interval: str = "epoch"
    plugins: tuple[str, ...] = ()
    #: Options and methods that add a plugin.
    implied: tuple[str, ...] = ()
    loader: str = "plain"
    optimisation: str = "automatic"
    accumulate: int = 1
    validation: str = "epoch"
    hook: str = ""
    noise: bool = False
    clip: bool = False
    sanity: int = 0
    #: Where the run ends: before the second batch of the second epoch (``"epoch"``; inside a window
    #: if batches are accumulated), or of its ``"validation"``.
    moment: str = "epoch"
    #: True if the plugins have another order after the border.
    reordered: bool = False
    #: The checkpoint: ``"auto"``, or ``"now"``: one that is saved at the moment.
    saved: str = "auto"
    #: True if a DataModule with state gives the batches.
    datamodule: bool = False
    #: How a rank of elastic ends: ``"killed"``, ``"error"`` or ``"hang"``.
    death: str = "killed"
    #: False if processes that the strategy starts import torch again, as a user's do, which takes
    #: seconds; else they are forks of this one. Objects are pickled in both cases.
    fork: bool = True

    def __str__(self) -> str:
        """Return what differs from the simplest draw."""
        default = Draw()
        parts = [self.border, self.strategy]
        for field in fields(self)[2:]:
            value = getattr(self, field.name)
            if value != getattr(default, field.name):
                text = "+".join(value) if isinstance(value, tuple) else value
                parts.append(f"{field.name}={text}")
        return " ".join(map(str, parts))

    @classmethod
    def read(cls, text: str) -> "Draw":
        """Return the draw that a text of ``str()`` means."""
        border, strategy, *rest = text.split(" ")
        kinds = {field.name: type(field.default) for field in fields(cls)}
        found: dict[str, Any] = {}
        for part in rest:
            name, _, value = part.partition("=")
            kind = kinds[name]
            if kind is tuple:
                found[name] = tuple(value.split("+"))
            else:
                found[name] = value == "True" if kind is bool else kind(value)
        return cls(border, strategy, **found)

    @property
    def monitor(self) -> str:
        return "loss_epoch" if self.validation == "none" else "val_loss"


# --- data -----------------------------------------------------------------------------------------


class Samples(data.Dataset):
    """Samples by number. Noise is added if ``noise``, and a multiple of a data module's level."""

    def __init__(self, numbers: Any, noise: bool = False, source: "Source | None" = None) -> None:
        self.numbers, self.noise, self.source = list(numbers), noise, source

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        x, y = sample(self.numbers[index], False)
        x = x if self.source is None else x + 0.1 * self.source.level
        return x + (0.1 * torch.rand(3) + random.random()) * self.noise, y


class Rotating(data.Sampler):
    """A user's sampler, with the epoch as torch's DistributedSampler has it."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter([(n + 3 * self.epoch) % self.count for n in range(self.count)])


class Batches(data.Sampler):
    """A user's batch sampler: random batches."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size

    def __len__(self) -> int:
        return self.count // self.size

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.count).tolist()
        yield from (order[n : n + self.size] for n in range(0, self.count, self.size))


class Own:
    """A user's loader: any iterable."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


class Stateful:
    """A user's loader that knows its position, as torchdata's StatefulDataLoader."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.at = batches, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.at % len(self.batches), len(self.batches)):
            self.at = number + 1
            yield self.batches[number]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def tensors(count: int = SAMPLES) -> list[torch.Tensor]:
    return [
        torch.stack(part) for part in zip(*(sample(n, False) for n in range(count)), strict=True)
    ]


def dataset_of(name: str) -> Any:
    """Return one of torch's datasets; a new class is built as Subset is, from a dataset."""
    first, second = Samples(range(10)), Samples(range(10, SAMPLES))
    if name == "TensorDataset":
        return data.TensorDataset(*tensors())
    if name == "StackDataset":
        return data.StackDataset(*tensors())
    if name == "ConcatDataset":
        return data.ConcatDataset([first, second])
    if name == "ChainDataset":
        return data.ChainDataset([Stream(0, 1), Stream(0, 1)])
    return getattr(data, name)(Samples(range(2 * SAMPLES)), range(SAMPLES))


def sampler_of(name: str, samples: Any) -> Any:
    """Return one of torch's samplers; a new class is built as SequentialSampler is."""
    if name == "DistributedSampler":
        return data.DistributedSampler(samples, 1, 0)
    if name == "SubsetRandomSampler":
        return data.SubsetRandomSampler(range(SAMPLES - 4))
    if name == "WeightedRandomSampler":
        return data.WeightedRandomSampler([1.0 + n % 3 for n in range(SAMPLES)], SAMPLES)
    return getattr(data, name)(samples)


def loader_of(kind: str, batch: int, rank: int, ranks: int, source: "Source | None" = None) -> Any:
    """Return the loader of a kind in :func:`pools.loaders`; only streams use rank and ranks."""
    samples, make = Samples(range(SAMPLES), source=source), data.DataLoader
    family, _, name = kind.partition(":")
    if family == "sampler":
        return make(samples, batch, sampler=sampler_of(name, samples))
    if family == "dataset":
        return make(dataset_of(name), batch)
    if family == "combined":
        several = {"a": make(samples, batch), "b": make(samples, 2, shuffle=True)}
        return gt.CombinedLoader(several, name)
    options: dict[str, Any] = {
        "shuffled": {"shuffle": True},
        "generator": {"shuffle": True, "generator": torch.Generator().manual_seed(3)},
        "drop_last": {"shuffle": True, "drop_last": True},
        "workers": {"shuffle": True, "num_workers": 1},
        "persistent": {"shuffle": True, "num_workers": 2, "persistent_workers": True},
        "own_sampler": {"sampler": Rotating(SAMPLES)},
    }.get(kind, {})
    if kind == "drop_last":
        samples = Samples(range(SAMPLES - 1))
    if kind == "batch_sampler":
        return make(
            samples, batch_sampler=data.BatchSampler(data.RandomSampler(samples), batch, False)
        )
    if kind == "own_batch_sampler":
        return make(samples, batch_sampler=Batches(SAMPLES, batch))
    if kind.startswith("iterable"):
        return make(Stream(rank, ranks), batch, num_workers=2 * (kind == "iterable_workers"))
    if kind == "noisy":
        return make(Samples(range(SAMPLES), noise=True), batch, shuffle=True)
    if kind == "several":
        return [make(samples, batch, shuffle=True), make(Samples(range(6)), 2, shuffle=True)]
    if kind == "torchdata":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(samples, batch, shuffle=True)
    loader = make(samples, batch, **options)
    if kind in ("list", "stateful"):
        return Stateful(list(loader)) if kind == "stateful" else list(loader)
    return Own(loader) if kind == "own" else loader


class Source(gt.DataModule):
    """A data module with state: a level that rises each epoch, as in a curriculum."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.draw, self.level = draw, 0

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.level = state["level"]

    def train_dataloader(self) -> Any:
        return train_loader(self.draw, self.trainer, self)


def train_loader(draw: Draw, trainer: Any, source: Source | None = None) -> Any:
    world = trainer.run.world
    batch = BATCH // world.data_size
    return loader_of(draw.loader, batch, world.data_rank, world.data_size, source)


def pairs(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all samples of a batch, also of one of several loaders."""
    leaves = [x for x in torch.utils._pytree.tree_leaves(batch) if isinstance(x, torch.Tensor)]
    return torch.cat(leaves[::2]), torch.cat(leaves[1::2])


# --- the module -----------------------------------------------------------------------------------


class Ended(Exception):
    """Ends a run at the moment of the draw."""


class Model(gt.Module):
    """A small regression model. The draw selects its optimizers, hooks and loaders."""

    def __init__(self, draw: dict[str, Any], seed: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()
        #: The settings of this run, which is on one side of the border; see :func:`program`.
        self.part: dict[str, Any] = {}
        draw["plugins"] = tuple(draw["plugins"])
        self.draw = Draw(**draw)
        random_state = torch.get_rng_state()
        torch.manual_seed(seed)
        noise = [nn.BatchNorm1d(4), nn.Dropout(0.2)] if self.draw.noise else []
        self.backbone = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), *noise)
        self.head = nn.Linear(4, 1)
        if self.draw.optimizer == "SparseAdam":
            self.table = nn.Embedding(4, 4, sparse=True)
        torch.set_rng_state(random_state)
        self.register_buffer("calls", torch.zeros(()))
        self.automatic_optimization = self.draw.optimisation != "manual"
        self.trace: dict[str, Any] = {}
        self.batches: dict[str, Any] = {}
        self.steps_begun = 0
        if self.draw.datamodule:
            self.on_train_epoch_end = self._next_level
        if self.draw.hook and self.draw.hook != "on_save_checkpoint":
            self.event = getattr(self, self.draw.hook)
            setattr(self, self.draw.hook, self._change)

    def _next_level(self) -> None:
        self.trainer.datamodule.level += 1

    def _change(self, *arguments: Any) -> None:
        """Change state in an event: a buffer, and a weight that training uses."""
        self._count()
        self.event(*arguments)

    def _count(self) -> None:
        self.calls += 1
        with torch.no_grad():
            self.head.bias += 0.001 * self.calls.to(self.head.bias.dtype)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the weights under other names, and a number that no buffer has."""
        if self.draw.hook == "on_save_checkpoint":
            weights = checkpoint["model"]
            checkpoint["model"] = {f"old_{name}": value for name, value in weights.items()}
            checkpoint["steps_begun"] = self.steps_begun

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.draw.hook == "on_save_checkpoint":
            weights = checkpoint["model"]
            checkpoint["model"] = {n.removeprefix("old_"): v for n, v in weights.items()}
            self.steps_begun = checkpoint["steps_begun"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.head.weight.dtype) if not torch.is_autocast_enabled("cpu") else x
        found = self.backbone(x)
        if hasattr(self, "table"):
            found = found + self.table((x[:, 0].abs() * 2).long() % 4)
        return self.head(found)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = pairs(batch)
        found = self(x)
        return nn.functional.mse_loss(found, y.to(found.dtype))

    def train_dataloader(self) -> Any:
        return train_loader(self.draw, self.trainer)

    def val_dataloader(self) -> Any:
        validates = self.draw.validation != "none"
        return data.DataLoader(Samples(range(SAMPLES, SAMPLES + 6)), 2) if validates else None

    def test_dataloader(self) -> Any:
        return data.DataLoader(Samples(range(SAMPLES, SAMPLES + 5)), 2)

    predict_dataloader = test_dataloader

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        Path(self.part["folder"], f"begun-{self.global_rank}").touch()
        self.steps_begun += 1
        self._end_at("epoch" if self.draw.saved != "now" else "", batch_idx)
        if self.part.get("keep_batches"):
            self.batches[f"{self.current_epoch} {batch_idx}"] = batch
        loss = self.loss(batch)
        rates = [g["lr"] for o in self._optimizers() for g in o.param_groups]
        self.trace[f"{self.current_epoch} {batch_idx}"] = [float(loss.detach()), *map(float, rates)]
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        if self.automatic_optimization:
            return loss

        def gradients(loss: torch.Tensor | None = None) -> torch.Tensor:
            loss = self.loss(batch) if loss is None else loss
            for optimizer in self._optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            return loss.detach()

        if self.draw.optimizer != "LBFGS":
            gradients(loss)
        for optimizer in self._optimizers():
            optimizer.step(*([gradients] if self.draw.optimizer == "LBFGS" else []))
        schedulers = self.lr_schedulers() or []
        for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
            plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*([float(loss.detach())] if plateau else []))
        return None

    def _optimizers(self) -> list[Any]:
        found = self.optimizers()
        return found if isinstance(found, list) else [found]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking and self.draw.saved != "now":
            self._end_at("validation", batch_idx)
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._end_at("epoch" if self.draw.saved == "now" else "", batch_idx)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self._end_at("validation" if self.draw.saved == "now" else "", batch_idx)

    def _end_at(self, moment: str, batch_idx: int) -> None:
        """End the process or the run in the second epoch, if the draw asks for it."""
        ends, dies = self.part.get("ends", ""), self.part.get("dies")
        at = (moment, self.current_epoch, batch_idx)
        if at != (self.draw.moment, 1, 1):
            return
        if dies and self.global_rank == 1 and not os.path.exists(dies):
            Path(dies).touch()
            if self.draw.death == "error":
                raise Ended
            while self.draw.death == "hang":
                time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        if not ends:
            return
        if self.draw.saved == "now":
            self.trainer.save_checkpoint(Path(self.part["folder"], "now.ckpt"))
        if ends == "killed":
            for worker in multiprocessing.active_children():  # they would notice in seconds
                worker.kill()
            os._exit(KILLED)
        raise Ended

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]  # a plugin may have frozen some
        parts = [trained]
        if self.draw.optimisation == "several":
            parts = [list(self.head.parameters())]
            inside = {id(p) for p in parts[0]}
            parts.append([p for p in trained if id(p) not in inside])
        sparse = list(self.table.parameters()) if hasattr(self, "table") else []
        made = [o for p in parts for o in pools.optimizers_of(self.draw.optimizer, p, sparse)]
        if not self.draw.scheduler:
            return made
        settings = {"interval": self.draw.interval, "monitor": self.draw.monitor}
        return made, [
            {"scheduler": pools.scheduler_of(self.draw.scheduler, optimizer), **settings}
            for optimizer in made
        ]


class BackwardModel(Model):
    """Override ``backward`` with the default's calculation, as the classes below do."""

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


class ClippingModel(Model):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, 0.5)


class SteppingModel(Model):
    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer.step(closure=optimizer_closure)


class ZeroingModel(Model):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad()


class TrainingOutputsModel(Model):
    def training_epoch_end(self, outputs: Any) -> None:
        self.log("outputs", float(bool(outputs)))


class ValidationOutputsModel(Model):
    def validation_epoch_end(self, outputs: Any) -> None:
        self.log("val_outputs", float(bool(outputs)))


class TestOutputsModel(Model):
    def test_epoch_end(self, outputs: Any) -> None:
        self.log("test_outputs", float(bool(outputs)))


#: By method that adds a plugin. A draw has at most one.
CLASSES: dict[str, type[Model]] = {
    next(name for name in vars(each) if not name.startswith("_")): each
    for each in Model.__subclasses__()
}


def class_of(draw: Draw) -> type[Model]:
    methods = [name.rpartition("Module.")[2] for name in draw.implied if "Module." in name]
    return CLASSES[methods[0]] if methods else Model


# --- one run --------------------------------------------------------------------------------------


def trainer_of(draw: Draw, folder: str, part: dict[str, Any]) -> gt.Trainer:
    """Return the trainer of one side of the border."""
    strategy, ranks = part["strategy"], part["ranks"]
    limits: dict[str, Any] = {
        "epoch": {},
        "none": {},
        "inside": {"val_check_interval": 2},
        "half": {"val_check_interval": 0.5},
        "rare": {"check_val_every_n_epoch": 2},
    }[draw.validation]
    options = pools.STRATEGY_OPTIONS.get(strategy)
    if draw.fork and strategy == "elastic":
        options = {"timeout": 8}  # forks start at once
    plugins = {
        f"{number} {name}": pools.plugin_of(name, draw.monitor, folder)
        for number, name in enumerate(draw.plugins)
    }
    if draw.reordered and part.get("resume"):
        plugins = dict(reversed(plugins.items()))
    implied: dict[str, Any] = {}
    for name in draw.implied:
        implied |= pools.IMPLIED.get(name, {})
    return gt.Trainer(
        accelerator="cpu",
        strategy=ThreadRanks(ranks) if strategy == "threads" else strategy,
        strategy_options=options,
        devices=ranks,
        precision=draw.precision,
        accumulate_grad_batches=draw.accumulate,
        gradient_clip_val=0.5 if draw.clip else None,
        max_epochs=part.get("epochs", EPOCHS),
        plugins=[*plugins.values(), Ends(plugins)],
        output=None if part.get("no_output") else Path(folder, "run"),
        seed=1,
        log_every_n_steps=2,
        num_sanity_val_steps=part.get("sanity", draw.sanity),
        enable_progress_bar=False,
        **{**limits, **implied},
    )


class Ends:
    """Stores each rank's results as an attribute of its module when the run ends."""

    def __init__(self, plugins: dict[str, Any]) -> None:
        self.plugins = plugins

    @gt.hookimpl
    def on_run_end(self, run: gt.Run) -> None:
        if run.command != "fit":
            return
        module = run.module
        parts = {n: p for n, p in sorted(self.plugins.items()) if hasattr(p, "state_dict")}
        module.results = {
            "optimizers": [o.state_dict() for o in run.optimizers],
            "schedulers": [s.scheduler.state_dict() for s in run.schedulers],
            "metrics": {n: v for n, v in run.metrics.items() if not n.startswith(OF_PROCESS)},
            "counters": [run.step, run.epoch],
            "trace": module.trace,
            "batches": module.batches,
            "parts": {n: p.state_dict() for n, p in parts.items() if type(p).__name__ not in TIMED},
        }


#: Plugins whose state is a time.
TIMED = ("Timer", "Throughput", "ThroughputMonitor")
#: Metrics of the throughput plugins: speeds, and totals of a process.
OF_PROCESS = ("device/", "global/", "train/")


def program(draw: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """Run one side of the border in this process, which is a rank or starts its ranks.

    ``part`` has ``folder``, ``strategy`` and ``ranks``, and may have ``ends``, ``resume`` (a file
    or a word), ``fits`` (the seeds of the modules that are fitted one after the other; ``None``:
    the one before again), ``new_trainer`` (for each fit), ``then`` (``"test"``).
    """
    torch.set_num_threads(1)
    if draw["fork"]:
        for starter in (geartrain_spawn.starter, geartrain_elastic.starter):
            starter.start_context = lambda *_: multiprocessing.get_context("fork")
    folder = str(Path(part["folder"]).absolute())
    read = Draw(**{**draw, "plugins": tuple(draw["plugins"])})
    trainer = trainer_of(read, folder, part)
    found: dict[str, Any] = {}
    module: Any = None
    for number, seed in enumerate(part.get("fits", [0])):
        if seed is not None:
            module = class_of(read)(dict(draw), seed=seed)
            module.part = {**part, "folder": folder}
            source = Source(read) if read.datamodule else None
        if part.get("then") == "load":
            break
        if number and part.get("new_trainer"):
            trainer = trainer_of(read, str(Path(folder, "new")), part)  # its files are new too
        trainer.fit(module, datamodule=source, ckpt_path=part.get("resume"))
        found = {"weights": module.state_dict(), **module.results}
        found["after"] = [module.global_step, module.current_epoch]
    if part.get("then"):
        path = part.get("file")
        found["test"] = trainer.test(module, ckpt_path=path)
        if path is not None:
            loaded = class_of(read).load_from_checkpoint(path).eval()
        else:
            loaded = module.eval()
        with torch.no_grad():
            found["loaded"] = [loaded(batch[0]) for batch in module.test_dataloader()]
    if part["strategy"] in pools.SHARDED and trainer.global_rank:
        return {}  # only rank 0 has whole tensors
    return found
