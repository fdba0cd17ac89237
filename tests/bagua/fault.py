"""Train on two ranks; one of them fails: ``fault.py KIND RANK WHERE``.

``OPTIONS`` has the strategy's options. Files in the directory ``marks`` show which code ran.
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
from faulty import Watch, fault, mark


class Model(gt.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        if batch_idx == 5:
            fault("train")
        return self.net(batch[0]).square().mean()

    def on_after_backward(self):
        if self.trainer.global_step == 5:  # gradients are being sent
            fault("backward")

    def validation_step(self, batch, batch_idx):
        if batch_idx == 1:
            fault("validation")
        self.log("mean", self.net(batch[0]).mean(), sync_dist=True)

    def configure_optimizers(self):
        fault("setup")
        if os.environ.get("OPTIMIZER"):
            from geartrain import strategies

            return getattr(strategies, os.environ["OPTIMIZER"])(
                self.parameters(), lr=0.01, warmup_steps=2
            )
        return torch.optim.SGD(self.parameters(), 0.1)

    def teardown(self, stage):
        mark("teardown")


def main() -> None:
    data = TensorDataset(torch.randn(64, 4))
    trainer = gt.Trainer(
        accelerator="cpu",
        strategy="bagua",
        strategy_options={
            "timeout": float(os.environ.get("TIMEOUT", "60")),
            **json.loads(os.environ["OPTIONS"]),
        },
        devices=2,
        max_epochs=2,
        enable_progress_bar=False,
        plugins=[Watch()],
        num_sanity_val_steps=0,
        seed=1,
    )
    trainer.fit(Model(), DataLoader(data, 4), DataLoader(data, 4))
    mark("done")


if __name__ == "__main__":
    main()
