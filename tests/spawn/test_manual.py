"""Manual optimisation with ddp_spawn: it trains like one process, and its weights come back."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import geartrain as gt

from .models import loader, samples, trainer


class Two(gt.Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False  # only an attribute of the object, which travels
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            with self.toggled_optimizer(optimizer):
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()

    def loss(self, batch):
        return nn.functional.mse_loss(self.b(torch.tanh(self.a(batch[0]))), batch[1])

    def configure_optimizers(self):
        self.kept = torch.optim.SGD(self.a.parameters(), lr=0.1)
        return [self.kept, torch.optim.Adam(self.b.parameters(), lr=0.01)]


def test_weights_come_back_and_equal_those_of_one_process():
    one = trainer()
    module = Two()
    expected = copy.deepcopy(module)
    one.fit(module, loader())
    optimizers = expected.configure_optimizers()
    for _ in range(2):
        for batch in DataLoader(samples(), batch_size=8):
            for optimizer in optimizers:
                expected.zero_grad()
                expected.loss(batch).backward()
                optimizer.step()
    for found, p in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, p, rtol=1e-4, atol=1e-6)
    assert one.global_step == 12
    assert all(p.requires_grad for p in module.parameters())
    assert not {"step", "zero_grad"} & set(vars(module.kept))


def test_a_plugin_that_reduces_buckets_is_refused_before_a_rank_starts():
    class Buckets:
        @gt.hookimpl
        def reduce_bucket(self, run, bucket): ...

    with pytest.raises(gt.UsageError, match=r"Buckets: its reduce_bucket would never be called"):
        trainer(plugins=[Buckets()]).fit(Two(), loader())
