"""Small modules and data of the conformance programs, in float64, the same in every process."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import geartrain as gt

#: Environment variable with every module's optimizer and its arguments, as JSON; empty: torch's.
OPTIMIZER = "GEARTRAIN_CONFORMANCE_OPTIMIZER"
#: The first whole number that float64 would round.
LARGE = 2**53 + 1


def samples(count: int) -> TensorDataset:
    """Return samples ``(x, y, number)``: float64 ``[3]``, float64 ``[1]``, int64 ``[]``."""
    numbers = torch.arange(count)
    x = torch.stack(
        [torch.sin(numbers * 0.7), torch.cos(numbers * 1.3), torch.sin(numbers * 0.31 + 1)], dim=1
    ).double()
    return TensorDataset(x, x.sum(dim=1, keepdim=True).sin(), numbers)


class Net(gt.Module):
    """A regression with two hidden layers.

    It is in float64, so that another order of additions changes the last digits only.

    Args:
        width: the width of the hidden layers.
        optimizer: ``"sgd"``, ``"adam"``, or ``"two"``: SGD for the first layer, Adam elsewhere.
        norm: ``True`` puts a BatchNorm after the first layer.
    """

    def __init__(self, width: int = 6, optimizer: str = "sgd", norm: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first = nn.Linear(3, width)
            self.second = nn.Linear(width, width)
            self.last = nn.Linear(width, 1)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.double()
        self.optimizer = optimizer
        #: Values that this rank records.
        self.notes: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.first(x)))
        return self.last(torch.tanh(self.second(hidden)))  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"number": batch[2], "prediction": self(batch[0])}

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        if chosen := chosen_optimizer(trained):
            return chosen
        if self.optimizer == "two":
            return [torch.optim.SGD(trained[:2], lr=0.1), torch.optim.Adam(trained[2:], lr=0.01)]
        if self.optimizer == "adam":
            return torch.optim.Adam(trained, lr=0.01)
        # Wide layers need smaller steps: otherwise training diverges, and results say nothing.
        lr = min(0.1, 1 / self.second.in_features)
        return torch.optim.SGD(trained, lr=lr, momentum=0.5)


def chosen_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer | None:
    """Return the optimizer that the test class names, if any."""
    chosen = json.loads(os.environ.get(OPTIMIZER, "{}"))
    return resolve_name(chosen.pop("class"))(parameters, **chosen) if chosen else None


def notes_of(run: gt.Run) -> dict[str, Any]:
    """Return the notes of a run's module."""
    assert isinstance(run.module, Net)
    return run.module.notes


class Frozen(Net):
    """A net whose first layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


class Unused(Net):
    """Leaves out layers: one in every other step, and one on all ranks but rank 0.

    Every other step leaves out the layer ``second``. The layer ``extra`` is only for samples whose
    number is a multiple of ``ranks``. If a loader gives rank r the samples r, r + ranks, …, only
    rank 0 uses it.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.extra = nn.Linear(3, 1).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, number = batch
        hidden = torch.tanh(self.first(x))
        predicted = self.last(hidden if batch_idx % 2 else torch.tanh(self.second(hidden)))
        is_used = number % self.ranks == 0
        if is_used.any():
            predicted = predicted + self.extra(x) * is_used[:, None]
        loss = nn.functional.mse_loss(predicted, y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


class Alternating(Net):
    """A net that leaves out the layer ``second`` in every other step, on all ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = torch.tanh(self.first(batch[0]))
        return nn.functional.mse_loss(
            self.last(hidden if batch_idx % 2 else torch.tanh(self.second(hidden))), batch[1]
        )


class Weighted(Net):
    """Returns sums of losses and the numbers of samples that count, which differ between batches.

    Every fourth sample does not count.
    """

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, number = batch
        counts = number % 4 > 0
        loss = ((self(x) - y).square().flatten() * counts).sum()
        weight = counts.sum()
        mean = loss / weight.clamp(min=1)
        self.log("loss", mean, batch_size=weight, on_step=True, on_epoch=True, sync_dist=True)
        return {"loss": loss, "weight": weight}


class Scheduled(Net):
    """A net whose learning rate halves with each optimizer step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        schedule = {
            "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
            "interval": "step",
        }
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def on_train_end(self) -> None:
        optimizer = self.optimizers()
        assert isinstance(optimizer, torch.optim.Optimizer)
        self.notes["lr"] = optimizer.param_groups[0]["lr"]


class Apart(Net):
    """A net that starts with different weights and buffers on each rank.

    It records its state when it is made, and when training starts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    def setup(self, stage: str) -> None:
        rank = self.trainer.global_rank
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(100 + rank)
            for layer in (self.first, self.second, self.last):
                layer.reset_parameters()
        self.get_buffer("offset").fill_(rank + 1 / 3)
        self.get_buffer("count").fill_(LARGE + rank)
        self.notes["made"] = self._state()

    def on_train_start(self) -> None:
        self.notes["start"] = self._state()

    def _state(self) -> dict[str, torch.Tensor]:
        return copied(self.state_dict())


def copied(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of tensors on the CPU.

    Sharded ones (DTensors) are gathered: then every rank must call this.
    """
    whole = {name: getattr(each, "full_tensor", lambda e=each: e)() for name, each in state.items()}
    return {name: tensor.detach().cpu().clone() for name, tensor in whole.items()}


#: Steps of ``EveryStep`` before its last, in which the last rank's loss is NaN.
STEPS = 100
#: One rank's gradient less ``ranks``, relative to it: a smaller type would lose it.
DIGIT = {"bf16": 0.0, "f32": 2**-10, "f64": 2**-30}


def batch_size(rank: int, step: int) -> int:
    """Return the samples in a rank's batch in ``EveryStep``: 4, or 1 to 4 in unequal steps."""
    return 1 + (step // 5 + rank) % 4 if is_unequal(step) else 4


def is_unequal(step: int) -> bool:
    """True for the steps of ``EveryStep``, from 0, in which ranks have unequal batches."""
    return step % 5 == 2


class EveryStep(Net):
    """Moves a known entry of each parameter in each step, so that a lost gradient shows.

    The loss is a sum of parameters, so gradients do not depend on weights or samples. The mean over
    ranks is 1 for each entry of ``bf16``, ``f32`` and ``f64``, which have an entry for each
    rank; of ``steps``, which has one for each step, the mean of the ranks' numbers, from 1. SGD
    with the learning rate 1 subtracts it. In the last step ``broken`` has the gradient NaN on the
    last rank.

    Args:
        ranks: the number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.first = self.second = self.last = nn.Identity()  # type: ignore[assignment]
        # The smallest type is first: a strategy may use the first one for all.
        self.bf16 = nn.Parameter(torch.zeros(ranks, dtype=torch.bfloat16))
        self.f32 = nn.Parameter(torch.zeros(ranks, dtype=torch.float32))
        self.f64 = nn.Parameter(torch.zeros(ranks, dtype=torch.float64))
        self.steps = nn.Parameter(torch.zeros(STEPS + 1, dtype=torch.float64))
        self.broken = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def train_dataloader(self) -> DataLoader[Any]:
        rank = self.trainer.global_rank
        sizes = [batch_size(rank, step) for step in range(STEPS + 1)]
        return DataLoader(Batches(sizes), batch_size=None)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEPS:
            self.notes["trained"] = copied(dict(self.named_parameters()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rank = self.trainer.global_rank
        breaks = batch_idx == STEPS and rank == self.ranks - 1
        count = self.ranks
        return (
            self.bf16[rank].double() * count * (1 + DIGIT["bf16"])
            + self.f32[rank].double() * count * (1 + DIGIT["f32"])
            + self.f64[rank] * count * (1 + DIGIT["f64"])
            + self.steps[batch_idx] * (rank + 1)
            + self.broken.sum() * (math.nan if breaks else 0.0)
        )

    def configure_optimizers(self) -> Any:
        trained = list(self.parameters())
        return chosen_optimizer(trained) or torch.optim.SGD(trained, lr=1.0)


class Unfreezes(Net):
    """Unfreezes a parameter before the fourth step; each rank moves its own entry."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.unfrozen_late = nn.Parameter(
            torch.zeros(ranks, dtype=torch.float64), requires_grad=False
        )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.unfrozen_late.requires_grad_(True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        unfrozen = self.unfrozen_late[self.trainer.global_rank] * len(self.unfrozen_late)
        return super().training_step(batch, batch_idx) + unfrozen

    def configure_optimizers(self) -> Any:
        every = list(self.parameters())
        return chosen_optimizer(every) or torch.optim.SGD(every, lr=0.1)


class OwnEntries(Net):
    """Each rank's loss raises its own entry. Other entries change only if ranks communicate."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.entries = nn.Parameter(torch.zeros(ranks, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        entries = torch.zeros_like(self.entries)
        entries[self.trainer.global_rank] = 1.0
        return (
            super().training_step(batch, batch_idx) + ((self.entries - 1) * entries).square().sum()
        )


class Gradients(Net):
    """Records its gradients after the first micro-batch of the first window."""

    def on_after_backward(self) -> None:
        if "gradients" not in self.notes:
            gradients = {n: p.grad for n, p in self.named_parameters() if p.grad is not None}
            self.notes["gradients"] = list(copied(gradients).values())


class Parts(Net):
    """Computes its losses in ``*_step_end``, over all parts of the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self(batch[0]) - batch[1]).square()

    def training_step_end(self, outputs: Any) -> Any:
        self.notes["training_step_end"] = type(outputs).__name__
        loss = torch.cat(list(outputs)).mean()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return (self(batch[0]) - batch[1]).square()

    def validation_step_end(self, outputs: Any) -> Any:
        self.notes["validation_step_end"] = type(outputs).__name__
        self.log("val_loss", torch.cat(list(outputs)).mean(), sync_dist=True)


class Metrics(Net):
    """Logs sum, min and max of the samples' numbers, and the mean of their squares.

    The mean is of squares, because every other number has the same mean as all numbers: without
    squares, one rank's mean would pass.
    """

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        number = batch[2].double()
        self.log("mean", number.square().mean(), sync_dist=True)
        self.log("sum", number.sum(), reduce_fx="sum", sync_dist=True)
        self.log("min", number.min(), reduce_fx="min", sync_dist=True)
        self.log("max", number.max(), reduce_fx="max", sync_dist=True)
        self.log("one", 1.0, sync_dist=True)
        # NaN for one sample, which only one rank has; and digits that float32 would lose.
        self.log("nan", torch.where(number == 0, math.nan, 1.0).mean(), sync_dist=True)
        self.log("large", 2**24 + number.max(), reduce_fx="max", sync_dist=True)

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        rank = self.trainer.global_rank
        self.log("weighted", float(rank), batch_size=rank + 1, sync_dist=True)


class GathersInValidation(Net):
    """A net with a collective in each ``validation_step``."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.all_gather(batch[2].double().sum())


class Stream(IterableDataset[Any]):
    """A dataset without a length."""

    def __init__(self, count: int) -> None:
        self._samples = samples(count)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._samples)


class Batches(IterableDataset[Any]):
    """Whole batches of these sizes; each rank has its own."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Any]:
        return (samples(size)[:] for size in self.sizes)


class Streams(Net):
    """Has training data without a length: 3 batches on the last rank, 5 on the others."""

    def train_dataloader(self) -> DataLoader[Any]:
        last = self.trainer.global_rank == self.trainer.world_size - 1
        return DataLoader(Stream(2 * (3 if last else 5)), 2)


class LogsOnOneRank(Net):
    """Logs a metric on the last rank only."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_rank == self.trainer.world_size - 1:
            self.log("of_one_rank_only", 1.0, on_step=True, sync_dist=True)
        return super().training_step(batch, batch_idx)


class Dies(Net):
    """Kills its process on the last rank in the fourth step, once.

    Args:
        mark: a file that shows that it has happened.
    """

    def __init__(self, mark: str) -> None:
        super().__init__(optimizer="adam")
        self.mark = mark

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        trainer, mark = self.trainer, Path(self.mark)
        is_last = trainer.global_rank == trainer.world_size - 1
        if trainer.global_step == 3 and is_last and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


#: The start of the message of the error that a rank raises on purpose; the phase follows.
MEANT = "the conformance kit's own error, raised on purpose in"


class Faulty(Net):
    """Fails on the last rank.

    Args:
        kind: ``"exception"``, or the name of a signal that the rank sends to itself.
        where: the phase.
        marks: folder for empty files that mark what happened.
    """

    def __init__(self, kind: str, where: str, marks: str) -> None:
        super().__init__()
        self.kind, self.where, self.marks = kind, where, marks

    def fault(self, where: str) -> None:
        """Fail if this is the phase and the rank to fail."""
        trainer = self.trainer
        if where != self.where or trainer.global_rank != trainer.world_size - 1:
            return
        Path(self.marks, "fault").touch()
        if self.kind == "exception":
            raise RuntimeError(f"{MEANT} {where}")
        os.kill(os.getpid(), getattr(signal, self.kind))
        threading.Event().wait()

    def setup(self, stage: str) -> None:
        self.fault("setup")

    def configure_optimizers(self) -> Any:
        self.fault("configure_optimizers")
        return super().configure_optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            self.fault("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.fault("validation_step")
        return super().validation_step(batch, batch_idx)

    def on_train_end(self) -> None:
        self.fault("on_train_end")

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.fault("test_step")
        return super().test_step(batch, batch_idx)

    def teardown(self, stage: str) -> None:
        Path(self.marks, f"teardown-{self.trainer.global_rank}").touch()
