"""The training of the loggers' tests, and a list of open files."""

import contextlib
import os
import threading
from pathlib import Path

import small_models
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt


class Net(gt.Module):
    """A regression on three numbers. It also logs ``values``, and raises ``error`` at step 3."""

    def __init__(self, lr=0.1, widths=(3, 1), bias=True, note="a", loss=nn.functional.mse_loss):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(*widths, bias=bias), nn.Dropout(0.5))
        self.values, self.error, self.loss, self.lr = {}, None, loss, lr

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        if self.error is not None and self.global_step == 3:
            raise self.error
        self.log_dict({"loss": 1.0 + self.global_step, **self.values})
        return self.loss(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 100.0 + self.global_step)

    def test_step(self, batch, batch_idx):
        self.log("tested", 7.0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def loader():
    """Six batches."""
    return DataLoader(TensorDataset(torch.ones(24, 3), torch.ones(24, 1)), batch_size=4)


def trainer(*plugins, **options):
    given = {"max_epochs": 2, "log_every_n_steps": 2, **options}
    return small_models.trainer(plugins=list(plugins), **given)


def fit(*plugins, values=None, error=None, val=True, net=None, **options):
    """Train a new ``Net`` for two epochs with validation; return the trainer."""
    one, net = trainer(*plugins, **options), net or Net()
    net.values, net.error = values or {}, error
    one.fit(net, loader(), loader() if val else None)
    return one


def open_files():
    """Return the paths of the files that this process has open."""
    folder = Path("/proc/self/fd")
    paths = []
    for link in folder.iterdir() if folder.exists() else ():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this listing
            paths.append(os.readlink(link))
    return paths


def threads():
    return {thread.name for thread in threading.enumerate()}


def show_all(net):
    """Log one object of each kind, and one through the logger's own object."""
    net.log_image("images/cat", torch.tensor([[[0, 255]]], dtype=torch.uint8))
    net.log_histogram("weights", torch.tensor([0.0, 1.0, 1.0]))
    net.log_text("said", "<hello>")
    net.log_table("table", {"name": ["a|b"], "n": [1]})


class Shows(Net):
    """Calls ``show(module)`` once, in the validation after the first epoch."""

    def __init__(self, show=show_all):
        super().__init__()
        self.show = show

    def on_validation_epoch_end(self):
        if self.current_epoch == 0:
            self.show(self)
