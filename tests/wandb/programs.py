"""Functions for the programs that tests run; the tests themselves import wandb."""

import os
import sys
import urllib.request

import psutil
import torch

from geartrain import hookimpl
from geartrain_wandb import WandB

from .cases import Net, loader, offline, trainer


class Away:
    """A plugin that ends wandb's server after the first epoch."""

    @hookimpl
    def on_epoch_end(self, run):
        if run.epoch == 0:
            urllib.request.urlopen(os.environ["WANDB_BASE_URL"] + "/go-away").close()


def train_online(what):
    plugins = [Away()] if what == "goes" else []
    trainer(WandB(project="p"), *plugins).fit(
        Net(fails=ValueError() if what == "fails" else None), loader()
    )


def services():
    """Return the number of wandb's processes below this process."""
    return sum(
        process.name().startswith("wandb") for process in psutil.Process().children(recursive=True)
    )


class Count:
    @hookimpl
    def on_epoch_end(self, run):
        self.during = services()


def train_twice():
    assert "wandb" not in sys.modules
    count = Count()
    for _ in range(2):
        trainer(offline(), count).fit(Net(), loader(num_workers=1))
        assert count.during >= 1
        assert services() == 0


def train_on_a_rank():
    options = {"wandb": {"mode": "offline"}}
    one = trainer("wandb", strategy="ddp", devices=2, plugin_options=options, output="out")
    one.fit(Net(), loader(num_workers=1), loader())
    return "wandb" in sys.modules


class Batches:
    """An endless dataset."""

    def __iter__(self):
        while True:
            open("going", "w").close()
            yield torch.ones(2, 1)


def train_for_ever():
    trainer(offline()).fit(Net(), Batches())
