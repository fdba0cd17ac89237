"""The tuner with ddp_spawn: its result comes back, and the caller's module is unchanged."""

import os

import pytest
import torch
from torch.utils.data import DataLoader

from geartrain.tuning import Tuner

from .models import Net, loader, samples, trainer


class Tuned(Net):
    """Records its pids, which must not come back; a batch may have at most eleven samples."""

    def __init__(self):
        super().__init__()
        self.lr, self.batch_size, self.pids = 0.1, 2, []

    def training_step(self, batch, batch_idx):
        self.pids.append(os.getpid())
        if len(batch[0]) > 11:
            raise MemoryError("no room")
        return super().training_step(batch, batch_idx)

    def train_dataloader(self):
        return DataLoader(samples(), batch_size=self.batch_size)

    def on_train_end(self):
        pass


def state(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.fixture
def module():
    """A module; at the end only the tuned attribute may have changed."""
    module = Tuned()
    before, attributes = state(module), {"losses": [], "pids": [], "best": None}
    yield module
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert {name: getattr(module, name) for name in attributes} == attributes


def test_learning_rate(module):
    one = trainer()
    found = Tuner(one).lr_find(module, loader(), num_training=20, min_lr=1e-4)
    assert len(found.lrs) == len(found.losses) == len(found.raw_losses) == 20
    assert module.lr == found.suggestion() != 0.1
    assert one.global_step == 0


def test_batch_size_on_one_device(module):
    tuner = Tuner(trainer(devices=1))
    assert tuner.scale_batch_size(module) == module.batch_size == 8
    assert [trial.error for trial in tuner.trials] == ["", "", "", "no room"]
    assert all(trial.samples_per_second > 0 for trial in tuner.trials[:-1])
