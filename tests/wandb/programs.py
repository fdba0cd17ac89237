"""Functions for the programs that tests run; the tests themselves import wandb."""

import sys

import psutil
import torch

from geartrain import hookimpl

from .cases import Net, loader, offline, trainer


def services():
    """Return the number of wandb's processes below this process."""
    children = psutil.Process().children(recursive=True)
    return sum(child.name().startswith("wandb") for child in children)


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
