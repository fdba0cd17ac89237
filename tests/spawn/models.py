"""The modules that the tests of ddp_spawn train."""

import os
import signal
import sys
import threading
from datetime import timedelta
from multiprocessing import util
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt


def samples(n=48):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(n, 4, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


def loader(n=48, **options):
    return DataLoader(samples(n), batch_size=4, **options)


def trainer(start_method="fork", **options):
    strategy_options = {
        "start_method": start_method,
        "timeout": 60.0,
        **options.pop("strategy_options", {}),
    }
    return gt.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 2,
            "strategy": "ddp_spawn",
            "strategy_options": strategy_options,
            "max_epochs": 2,
            "seed": 3,
            "enable_progress_bar": False,
            "num_sanity_val_steps": 0,
            **options,
        }
    )


class Net(gt.Module):
    """A module with Adam, a schedule, BatchNorm, and a lambda, which plain pickle refuses."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.activation = lambda x: x.tanh()
        self.losses = []
        self.best = None

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.activation(self.net(x)), y)
        self.log("loss", loss, sync_dist=True)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("samples", float(len(batch[0])), reduce_fx="sum", sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def on_train_end(self):
        self.best = {"loss": min(self.losses), "weights": [self.net[0].weight.detach().clone()]}

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Faulty(Net):
    """Fails on one rank, and writes each rank's pid: ``Faulty(folder, "SIGKILL", rank=1)``.

    If the rank is late because it hangs or is stopped, the other rank waits for it.
    """

    def __init__(self, folder, kind, rank, where="train", error=None):
        super().__init__()
        self.folder, self.kind, self.rank = Path(folder), kind, rank
        self.where, self.error = where, error

    def mark(self, what):
        (self.folder / f"{what}-{self.global_rank}").write_text(str(os.getpid()))

    def fault(self, where):
        if where != self.where:
            return
        if self.kind in ("hang", "late"):
            # A short timeout. The strategy's is longer, because ranks may start at different times.
            dist.barrier()
            group = dist.new_group(timeout=timedelta(seconds=3))
            dist.barrier(group)  # connect the ranks
        if self.global_rank != self.rank:
            if self.kind in ("hang", "late"):
                dist.barrier(group)
            return
        self.mark("fault")
        if self.kind == "exception":
            raise self.error
        if self.kind == "exit":
            sys.exit(0)
        if self.kind == "_exit":
            os._exit(0)
        if not self.kind.startswith("hang"):
            os.kill(
                os.getpid(), signal.SIGSTOP if self.kind == "late" else getattr(signal, self.kind)
            )
        threading.Event().wait()

    def setup(self, stage):
        self.mark("pid")
        self.fault("setup")

    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            self.fault("train")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.fault("validation")
        return super().validation_step(batch, batch_idx)

    def teardown(self, stage):
        self.mark("teardown")


class AbortsAtExit(Faulty):
    """Rank 1 aborts while its process ends, after it has reported its error."""

    def setup(self, stage):
        super().setup(stage)
        if self.global_rank == 1:
            util.Finalize(None, os.abort, exitpriority=0)


class HangsInTeardown(Faulty):
    """The rank that fails hangs in its teardown."""

    def teardown(self, stage):
        super().teardown(stage)
        if self.global_rank == self.rank:
            threading.Event().wait()


def is_gone(folder, rank):
    """True if the process of a rank has ended."""
    try:
        os.kill(int((Path(folder) / f"pid-{rank}").read_text()), 0)
    except ProcessLookupError:
        return True
    return False
