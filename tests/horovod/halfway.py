"""Runs of one rank whose set-up fails, in one program: ``halfway.py FOLDER``.

A run that works follows each of them. Also records how Horovod is initialised. The results are in
``FOLDER/halfway.pt``.
"""

import os
import sys
import threading

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt
from geartrain_horovod import HorovodStrategy, checks, launching
from geartrain_horovod.elastic import WorldChanged


class Net(gt.Module):
    fails = False

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        if self.fails:
            raise KeyError("an error of the user's code")
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class CannotAgree:
    """An elastic mode in which a peer dies before ranks have agreed on a commit."""

    every, call, last = None, 1, None

    def agree(self, run, collectives):
        raise WorldChanged("rank 0: agreement on a commit: a peer has gone")


class Changed:
    """Replaces a function of Horovod for a while."""

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
    trainer = gt.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, enable_progress_bar=False
    )
    trainer.fit(Net(), DataLoader(TensorDataset(torch.ones(4, 3)), 4))
    return trainer.global_step


def halfway(strategy):
    """Return the error of a run, and the threads and state of Horovod after it."""
    try:
        fit(strategy)
        error = None
    except gt.TrainingError as caught:
        error = f"{type(caught).__name__}: {caught}"
    ours = ("horovod-", "geartrain-horovod")
    left = {
        "initialised": hvd.is_initialized(),
        "threads": [t.name for t in threading.enumerate() if t.name.startswith(ours)],
    }
    return {"error": error, **left}


def initialised_with(**environment):
    """Return Gloo's timeout at each initialisation of Horovod."""
    timeouts, own = [], hvd.init

    def init(*arguments, **options):
        timeouts.append(os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS"))
        return own(*arguments, **options)

    os.environ.update(environment)
    with Changed("init", init):
        fit("horovod")
    for name in environment:
        del os.environ[name]
    return timeouts


def checked(devices):
    """Return the error of a plan, or ``None``."""
    try:
        gt.Trainer(strategy="horovod", accelerator="cpu", devices=devices).check(Net)
    except gt.UsageError as error:
        return str(error)
    return None


def user_calls_init():
    hvd.init()
    refused = [checked(1), checked(2)]
    hvd.shutdown()
    return [*refused, checked(2)]


def fails_under_mpirun():
    """Return the checks' errors after a run that worked and after one that failed.

    The environment is horovodrun's, because MPI's launchers start more than one process; here
    horovodrun counts as a launcher of MPI.
    """
    os.environ.update({f"HOROVOD_{name}": "0" for name in ("RANK", "LOCAL_RANK", "CROSS_RANK")})
    os.environ.update({f"HOROVOD_{name}": "1" for name in ("SIZE", "LOCAL_SIZE", "CROSS_SIZE")})
    launching._MPI = ("horovodrun",)
    with Changed("mpi_built", lambda: True):
        fit("horovod")
        before = checked("auto")
        Net.fails = True
        try:
            fit("horovod")
        except KeyError:
            return [before, checked("auto")]
    raise AssertionError("the run did not fail")


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
    kept["silence"] = [initialised_with(), initialised_with(HOROVOD_GLOO_TIMEOUT_SECONDS="45")]
    kept["hvd.init()"] = user_calls_init()
    # The last case: after it this process cannot train with Horovod.
    kept["mpirun"] = fails_under_mpirun()
    torch.save(kept, f"{folder}/halfway.pt")


if __name__ == "__main__":
    main(sys.argv[1])
