"""A module in manual optimisation and the same training in plain torch, shared by the tests."""

import copy

import torch
from torch import nn

import geartrain as gt


class Two(gt.Module):
    """Two linear layers, each with an optimizer; ``train(module, batch, batch_idx)`` is a step."""

    automatic_optimization = False

    def __init__(self, train=None, dtype=torch.float32):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4, dtype=dtype), nn.Linear(4, 1, dtype=dtype)
        self.train_by, self.schedulers = train, []

    def loss(self, batch):
        x, y = batch
        return nn.functional.mse_loss(self.b(torch.tanh(self.a(x))), y) * 0.01

    def training_step(self, batch, batch_idx):
        return (self.train_by or each_in_turn)(self, batch, batch_idx)

    def configure_optimizers(self):
        optimizers = [
            torch.optim.SGD(self.a.parameters(), lr=5.0, momentum=0.9),
            torch.optim.Adam(self.b.parameters(), lr=0.01),
        ]
        return optimizers, self.schedulers


def each_in_turn(module, batch, batch_idx):
    for optimizer in module.optimizers():
        with module.toggled_optimizer(optimizer):
            optimizer.zero_grad()
            module.manual_backward(module.loss(batch))
            optimizer.step()


def once(module, batch, batch_idx):
    """Run a whole step of the first optimizer."""
    optimizer = module.optimizers()[0]
    optimizer.zero_grad()
    module.manual_backward(module.loss(batch))
    optimizer.step()


def by_hand(module, batches, train, epochs=1):
    """Train a copy in plain torch by ``train(module, optimizers, batch, batch_idx)``; return it."""
    module = copy.deepcopy(module)
    optimizers, _ = module.configure_optimizers()
    for _ in range(epochs):
        for batch_idx, batch in enumerate(batches):
            train(module, optimizers, batch, batch_idx)
    return module


def in_turn_by_hand(module, optimizers, batch, batch_idx, clip=None):
    for optimizer in optimizers:
        for one in optimizers:
            one.zero_grad()
        module.loss(batch).backward()
        if clip:
            clip([p for group in optimizer.param_groups for p in group["params"]])
        optimizer.step()
