"""One rank of two, in a network namespace: ``wire.py ALGORITHM`` trains ``STEPS`` steps.

It prints the bytes per step that its interface sent and received, and the median time of a step.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt
from geartrain_bagua import BaguaStrategy

WIDTH, LAYERS = 1024, 5
PARAMETERS = LAYERS * WIDTH * WIDTH  # 20 MiB: buckets of 12, and of 8 MiB
FIRST = 2  # the counters are read after this step, and after the last step
STEPS = int(os.environ.get("STEPS", "8"))


def counters() -> tuple[int, int]:
    """Return the bytes that the interface other than loopback has sent and received."""
    (interface,) = (path for path in Path("/sys/class/net").iterdir() if path.name != "lo")
    files = (interface / "statistics" / f"{way}_bytes" for way in ("tx", "rx"))
    sent, received = (int(file.read_text()) for file in files)
    return sent, received


class Meter:
    """Reads the counters after the steps FIRST and STEPS, without set-up and teardown."""

    def __init__(self) -> None:
        self.read: list[tuple[int, int]] = []
        self.ended: list[float] = []

    @gt.hookimpl
    def on_step_end(self, run) -> None:
        self.ended.append(time.perf_counter())
        if len(self.ended) in (FIRST, STEPS):
            run.hooks.barrier(run=run)  # all bytes have arrived: no socket holds any
            self.read.append(counters())
            run.hooks.barrier(run=run)

    def a_step(self) -> dict[str, float]:
        first, last = self.read
        seconds = statistics.median(
            b - a for a, b in zip(self.ended[FIRST:], self.ended[FIRST + 1 :], strict=False)
        )
        sent, received = ((b - a) / (STEPS - FIRST) for a, b in zip(first, last, strict=True))
        return {"seconds": seconds, "sent": sent, "received": received}


class Model(gt.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(algorithm: str) -> Meter:
    meter = Meter()
    data = TensorDataset(torch.randn(2 * (STEPS + 1), WIDTH))
    trainer = gt.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        strategy=BaguaStrategy(algorithm=algorithm),
        max_epochs=1,
        enable_progress_bar=False,
        plugins=[meter],
    )
    trainer.fit(Model(), DataLoader(data, batch_size=1))
    return meter


if __name__ == "__main__":
    print("a step:", json.dumps(trained(sys.argv[1]).a_step()))
