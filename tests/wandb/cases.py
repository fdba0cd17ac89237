"""A small training for the tests of wandb, and a logger that records its calls."""

from pathlib import Path

import small_models
import torch
from several_ranks import command
from torch import nn
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain import hookimpl
from geartrain_wandb import WandB


class Net(gt.Module):
    """A model with one weight; ``fails`` is raised in the second epoch."""

    def __init__(self, lr: float = 0.5, fails=None):
        super().__init__()
        self.w, self.lr, self.fails = nn.Parameter(torch.zeros(1)), lr, fails

    def training_step(self, batch, batch_idx):
        if self.fails is not None and self.trainer.current_epoch == 1:
            raise self.fails
        loss = (self.w * batch).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", batch.mean())

    def test_step(self, batch, batch_idx):
        self.log("tested", batch.mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def loader(**options):
    return DataLoader(torch.ones(8, 1), batch_size=2, **options)


class Late:
    """Log values for a past optimizer step, and a value that is not a number."""

    @hookimpl
    def on_epoch_end(self, run):
        metrics = {"late": 7.5, "nan": float("nan")}
        run.hooks.log_metrics(run=run, metrics=metrics, step=run.step - 3)


class Handed:
    """Record logged values in the form of wandb's history."""

    def __init__(self):
        self.rows = []

    @hookimpl
    def log_metrics(self, run, metrics, step):
        self.rows.append({"trainer/global_step": step, "epoch": run.epoch, **metrics})


def trainer(*plugins, **options):
    """Return a trainer: two epochs on the CPU, every step logged, no progress bar."""
    given = {"max_epochs": 2, "log_every_n_steps": 1, **options}
    return small_models.trainer(plugins=plugins, **given)


def offline(**options):
    return WandB(**{"project": "tests", "mode": "offline"} | options)


def geartrain(*arguments):
    """Run a command in the working folder; return the finished process."""
    return command(Path.cwd(), *arguments)
