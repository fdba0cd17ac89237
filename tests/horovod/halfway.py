"""Runs of one rank whose set-up stops halfway, in one program, each followed by one that works: ``halfway.py FOLDER``. What was left after
each is in ``FOLDER/halfway.pt``."""

import sys
import threading

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt
from geartrain_horovod import HorovodStrategy, checks
from geartrain_horovod.elastic import WorldChanged


class Net(gt.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class CannotAgree:
    """An elastic mode in whose world a peer dies before ranks have agreed on a commit."""

    every, call, last = None, 1, None

    def agree(self, run, collectives):
        raise WorldChanged("rank 0: agreement on a commit: a peer has gone")


class Changed:
    """Something of Horovod's that answers otherwise for a while."""

    def __init__(self, name, instead):
        self.name, self.instead = name, instead

    def __enter__(self):
        self.own = getattr(hvd, self.name)
        setattr(hvd, self.name, self.instead)

    def __exit__(self, *_):
        setattr(hvd, self.name, self.own)


def refuse(*_, **__):
    raise ValueError("as Horovod says it")


def fit(strategy):
    trainer = gt.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, enable_progress_bar=False)
    trainer.fit(Net(), DataLoader(TensorDataset(torch.ones(4, 3)), 4))
    return trainer.global_step


def halfway(strategy):
    """The error, and what is left after it; then a run that works."""
    try:
        fit(strategy)
        error = None
    except gt.TrainingError as caught:
        error = f"{type(caught).__name__}: {caught}"
    ours = ("horovod-", "geartrain-horovod")
    left = {"initialised": hvd.is_initialized(), "threads": [t.name for t in threading.enumerate() if t.name.startswith(ours)]}
    return {"error": error, **left}


def main(folder):
    kept = {}
    strategy = HorovodStrategy()
    strategy._elastic, checks.check_elastic = CannotAgree(), lambda label: None
    kept["agree"] = halfway(strategy)
    kept["agree"]["steps"] = fit("horovod")
    for name, function, instead, options in (
        ("init", "init", refuse, {}),
        ("size", "size", lambda: 7, {}),
        ("timeline", "start_timeline", refuse, {"timeline": f"{folder}/timeline.json"}),
    ):
        with Changed(function, instead):
            kept[name] = halfway(HorovodStrategy(**options))
        kept[name]["steps"] = fit("horovod")
    torch.save(kept, f"{folder}/halfway.pt")


if __name__ == "__main__":
    main(sys.argv[1])
