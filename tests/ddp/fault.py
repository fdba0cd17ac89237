"""Train on two ranks; one of them fails: ``fault.py KIND RANK WHERE``. Markers in the directory ``marks`` say what ran."""

import atexit
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
from faulty import RANK, WHERE, Watch, fault, mark, mine


class Model(gt.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        mark("training", str(os.getpid()))
        if batch_idx == 5:
            fault("train")
            if WHERE == "pair":
                pair()
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        if batch_idx == 1:
            fault("validation")
        self.log("mean", self.net(batch[0]).mean(), sync_dist=True)

    def configure_optimizers(self):
        fault("setup")
        return torch.optim.SGD(self.parameters(), 0.1)

    def teardown(self, stage):
        mark("teardown")


def pair() -> None:
    """Rank 2 waits for rank 1, with less patience than all others have."""
    group = dist.new_group([1, 2], timeout=timedelta(seconds=4))
    fault("pair")
    if mine() == 2:
        dist.barrier(group)


def leave_after_rank_2() -> None:
    process, deadline = Path("/proc", Path("marks/training-2").read_text()), time.monotonic() + 20
    while process.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def main() -> None:
    if os.environ.get("LEAVES_LATE") == str(mine()):
        atexit.register(leave_after_rank_2)
    torch.manual_seed(0)
    workers = int(os.environ.get("LOADER_WORKERS", "0"))
    data = TensorDataset(torch.randn(64, 4))
    trainer = gt.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ.get("DEVICES", "2")),
        num_nodes=int(os.environ.get("NODES", "1")),
        max_epochs=int(os.environ.get("EPOCHS", "2")),
        enable_progress_bar=False,
        plugins=[Watch()],
        num_sanity_val_steps=0,
        strategy_options={"timeout": float(os.environ.get("TIMEOUT", "60"))},
        output=os.environ.get("OUTPUT"),
        seed=1,
    )
    model = Model()
    trainer.fit(model, DataLoader(data, 4, shuffle=True, num_workers=workers), DataLoader(data, 4, num_workers=workers))
    mark("weights", repr(model.net.weight.tolist()))
    fault("after")
    if WHERE == "between" and mine() != RANK:
        trainer.validate(Model(), DataLoader(data, 4))
    fault("between")
    mark("done")


if __name__ == "__main__":
    main()
