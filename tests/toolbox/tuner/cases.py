"""Modules, data and trainers for the tests of the finders."""

import random

import torch
from small_models import Net, loader, samples, trainer
from torch import nn
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain import hookimpl
from geartrain.tuning import Tuner


def find(module, train=None, options=None, **arguments):
    """Return a curve over 30 steps by default, without setting the suggestion."""
    given = {"num_training": 30, "update_attr": False, **arguments}
    return Tuner(trainer(**(options or {}))).lr_find(
        module, loader() if train is None else train, **given
    )


class Quadratic(gt.Module):
    """L/2 x². Gradient descent converges if the learning rate is below 2/L, otherwise diverges."""

    def __init__(self, curvature=4.0, lr=0.1, offset=0.0):
        super().__init__()
        self.x, self.curvature, self.lr, self.offset = (
            nn.Parameter(torch.ones(())),
            curvature,
            lr,
            offset,
        )

    def training_step(self, batch, batch_idx):
        return self.curvature / 2 * self.x**2 + self.offset

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Watch:
    """A plugin that only wraps; it records the learning rates of all groups in each step."""

    def __init__(self):
        self.lrs = []

    @hookimpl(wrapper=True)
    def optimizer_step(self, run, optimizer):
        self.lrs.append([float(group["lr"]) for group in optimizer.param_groups])
        return (yield)


class Never(Net):
    """A module that must not be set up: the error is raised before."""

    lr = 0.1

    def setup(self, stage):
        raise AssertionError("something was started")


class Data(gt.DataModule):
    def __init__(self, batch_size=5, n=1000):
        self.batch_size, self.n = batch_size, n

    def train_dataloader(self):
        return DataLoader(samples(self.n), batch_size=self.batch_size)


class Room(Net):
    """A module with memory for a limited number of samples."""

    def __init__(self, room=100, error=MemoryError):
        super().__init__()
        self.room, self.error = room, error

    def training_step(self, batch, batch_idx):
        if len(batch[0]) > self.room:
            raise self.error(f"no room for {len(batch[0])}")
        return super().training_step(batch, batch_idx)


def scale(module, data=None, options=None, **arguments):
    tuner = Tuner(trainer(**(options or {})))
    found = tuner.scale_batch_size(module, Data() if data is None else data, **arguments)
    return found, [trial.batch_size for trial in tuner.trials], tuner


class Keeps(Net):
    """A module with all kinds of state that a run may change."""

    def __init__(self, stepped=True):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(3), nn.Dropout(0.3)
        self.tied = nn.Linear(4, 3)
        self.tied.weight.data.copy_(self.layers[0].weight.T)
        self.layers[0].bias.grad = torch.ones(4)
        self.generator = torch.Generator().manual_seed(3)
        self.random = random.Random(4)
        self.seen, self.table, self.best = [1], {"a": [torch.zeros(2)]}, torch.zeros(2)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        if stepped:  # so that the optimizer has state
            for parameter in self.parameters():
                parameter.grad = torch.ones_like(parameter)
            self.optimizer.step()
        self.lr = 0.01

    def loss(self, batch):
        x, y = batch
        noise = torch.randn(x.shape, generator=self.generator) * self.random.random()
        return nn.functional.mse_loss(self.layers(self.drop(self.norm(x + noise))), y)

    def training_step(self, batch, batch_idx):
        self.seen.append(batch_idx)
        self.table["a"][0] += 1
        self.table["b"] = batch_idx
        self.best += 1
        self.extra = torch.ones(3)
        random.random()
        return super().training_step(batch, batch_idx)

    def on_fit_start(self):
        self.register_buffer("late", torch.ones(1))
        self.added = nn.Linear(1, 1)
        self.drop.eval()

    def configure_optimizers(self):
        scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        return [self.optimizer], [{"scheduler": scheduler, "interval": "step"}]


def snapshot(thing):
    """Return the whole state of a module as plain values that can be compared."""
    if isinstance(thing, torch.Tensor):
        gradient = None if thing.grad is None else thing.grad.tolist()
        return (
            str(thing.dtype),
            str(thing.device),
            thing.data_ptr(),
            thing.detach().double().tolist(),
            gradient,
            thing.requires_grad,
        )
    if isinstance(thing, torch.Generator):
        return thing.get_state().tolist()
    if isinstance(thing, random.Random):
        return thing.getstate()
    if isinstance(thing, nn.Module | torch.optim.Optimizer):
        return {name: snapshot(value) for name, value in vars(thing).items()}
    if isinstance(thing, dict):
        return {
            id(key) if isinstance(key, torch.Tensor) else key: snapshot(value)
            for key, value in thing.items()
        }
    if isinstance(thing, list | tuple):
        return [snapshot(item) for item in thing]
    return thing
