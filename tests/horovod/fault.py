"""Train on two ranks with Horovod; one rank fails: ``fault.py KIND``.

Each rank writes a file in ``marks`` for each event.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt

KIND, MARKS = sys.argv[1], Path("marks")


def mark(run, what):
    (MARKS / f"{what}-{run.world.rank}").write_text(str(os.getpid()))


class Model(gt.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        run = self.trainer.run
        if batch_idx == 5 and KIND == "skip":
            mark(run, "fault")
            if run.world.rank == 0:
                self.all_gather(torch.ones(1))  # rank 1 skips it and reduces gradients
        elif batch_idx == 5 and run.world.rank == 1:
            mark(run, "fault")
            if KIND == "exception":
                raise KeyError("my own error")
            os.kill(os.getpid(), getattr(signal, KIND))
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Watch:
    @gt.hookimpl
    def on_exception(self, run, error):
        mark(run, "on_exception")
        Path(MARKS, f"error-{run.world.rank}").write_text(f"{type(error).__name__}: {error}")


MARKS.mkdir(exist_ok=True)
data = DataLoader(TensorDataset(torch.randn(64, 4)), 4)
options = {"stall_timeout": float(os.environ["STALL"])} if "STALL" in os.environ else None
trainer = gt.Trainer(
    accelerator="cpu",
    strategy="horovod",
    devices=2,
    max_epochs=1,
    enable_progress_bar=False,
    plugins=[Watch()],
    strategy_options=options,
)
trainer.fit(Model(), data)
