"""One rank of two, in a network namespace: ``wire.py ALGORITHM`` trains and prints what its interface sent and received a step.

``by_hand_allreduce`` and ``by_hand_bytegrad`` communicate without the strategy.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt

WIDTH, LAYERS = 1024, 5
PARAMETERS = LAYERS * WIDTH * WIDTH  # 20 MiB: buckets of 12, and of 8 MiB
FIRST, LAST = 2, 8  # steps after which the counters are read


def interface() -> Path:
    """The one which is not loopback; /sys is the namespace's own."""
    (found,) = (path for path in Path("/sys/class/net").iterdir() if path.name != "lo")
    return found


def counters() -> tuple[int, int]:
    """Bytes that the interface has sent and received."""
    sent, received = ((interface() / "statistics" / f"{way}_bytes").read_text() for way in ("tx", "rx"))
    return int(sent), int(received)


class Meter:
    """Reads the counters after steps FIRST and LAST, so that set-up and teardown are in no difference."""

    def __init__(self) -> None:
        self.read: list[tuple[int, int]] = []
        self.steps = 0

    @gt.hookimpl
    def on_step_end(self) -> None:
        self.steps += 1
        if self.steps in (FIRST, LAST):
            self.read.append(counters())

    def a_step(self) -> dict[str, float]:
        (sent, received), (sent_later, received_later) = self.read
        steps = LAST - FIRST
        return {"sent": (sent_later - sent) / steps, "received": (received_later - received) / steps}


class Model(gt.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(algorithm: str) -> Meter:
    from geartrain_bagua import BaguaStrategy

    meter = Meter()
    data = TensorDataset(torch.randn(2 * (LAST + 1), WIDTH))
    trainer = gt.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        strategy=BaguaStrategy(algorithm=algorithm),
        max_epochs=1,
        enable_progress_bar=False,
        enable_checkpointing=False,
        plugins=[meter],
    )
    trainer.fit(Model(), DataLoader(data, batch_size=1))
    return meter


def by_hand(algorithm: str) -> Meter:
    from reference import bytegrad_between_ranks

    os.environ |= {"RANK": os.environ["NODE_RANK"], "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": interface().name}
    dist.init_process_group("gloo")
    meter = Meter()
    bucket = torch.randn(PARAMETERS, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(LAST):
        if algorithm == "by_hand_bytegrad":
            bytegrad_between_ranks(bucket)
        else:
            dist.all_reduce(bucket)
        meter.on_step_end()
    dist.barrier()
    dist.destroy_process_group()
    return meter


if __name__ == "__main__":
    choice = sys.argv[1]
    print("a step:", json.dumps((by_hand if choice.startswith("by_hand") else trained)(choice).a_step()))
