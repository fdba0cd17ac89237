"""Train on two ranks; one rank fails: ``fault.py KIND RANK WHERE``.

Ranks write marker files for what they ran to the directory ``marks``. ``STRATEGY`` is ddp or bagua,
``OPTIONS`` has its options, and ``OPTIMIZER`` names a class of geartrain.strategies.
"""

import atexit
import json
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
from faulty import Watch, fault, mark, mine


class Model(gt.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        mark("training", str(os.getpid()))
        if batch_idx == 5:
            fault("train")
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_after_backward(self):
        if self.trainer.global_step == 5:
            fault("backward")

    def validation_step(self, batch, batch_idx):
        if batch_idx == 1:
            fault("validation")
        self.log("mean", self.net(batch[0]).mean(), sync_dist=True)

    def configure_optimizers(self):
        fault("setup")
        if name := os.environ.get("OPTIMIZER"):
            return getattr(gt.strategies, name)(self.parameters(), lr=0.01, warmup_steps=2)
        return torch.optim.SGD(self.parameters(), 0.1)

    def teardown(self, stage):
        if "TEARS_DOWN_AFTER_RANK_1" in os.environ and mine() == 0:
            wait_for_the_end_of(1)
        mark("teardown")


class Slow:
    """Tears down slowly on one rank."""

    @gt.hookimpl
    def on_exception(self):
        if os.environ.get("SLOW") == str(mine()):
            threading.Event().wait(float(os.environ["SECONDS"]))
            mark("slow")


def wait_for_the_end_of(rank: int) -> None:
    process = Path("/proc", Path(f"marks/training-{rank}").read_text(), "stat")
    deadline = time.monotonic() + 20
    with suppress(OSError):  # the process has gone
        while "Z" not in process.read_text().rpartition(")")[2] and time.monotonic() < deadline:
            time.sleep(0.02)


def main() -> None:
    if os.environ.get("LEAVES_LATE") == str(mine()):
        atexit.register(wait_for_the_end_of, 2)
    if os.environ.get("ABORTS_AT_EXIT") == str(mine()):
        atexit.register(os.abort)
    torch.manual_seed(0)
    loader_workers = int(os.environ.get("LOADER_WORKERS", "0"))
    data = TensorDataset(torch.randn(64, 4))
    trainer = gt.Trainer(
        accelerator="cpu",
        strategy=os.environ.get("STRATEGY", "ddp"),
        devices=int(os.environ.get("DEVICES", "2")),
        num_nodes=int(os.environ.get("NODES", "1")),
        max_epochs=int(os.environ.get("EPOCHS", "2")),
        enable_progress_bar=False,
        plugins=[Watch(), Slow()],
        num_sanity_val_steps=0,
        strategy_options={
            "timeout": float(os.environ.get("TIMEOUT", "60")),
            **json.loads(os.environ.get("OPTIONS", "{}")),
        },
        output=os.environ.get("OUTPUT"),
        seed=1,
    )
    model = Model()
    trainer.fit(
        model,
        DataLoader(data, 4, shuffle=True, num_workers=loader_workers),
        DataLoader(data, 4, num_workers=loader_workers),
    )
    mark("weights", repr(model.net.weight.tolist()))
    fault("after")
    if "TEARS_DOWN_AFTER_RANK_1" in os.environ:
        trainer.validate(Model(), DataLoader(data, 4))
    mark("done")


if __name__ == "__main__":
    main()
