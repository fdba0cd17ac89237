"""A target of ``geartrain fit``, and the training of ranks.

``python programs.py '[FILE, STRATEGY, RANKS, OPTIONS, BATCH_SIZE]'`` trains and writes the weights.
"""

import json
import sys
from pathlib import Path

import torch

import geartrain as gt

sys.path.insert(0, str(Path(__file__).parent))  # this file is a script and a module
from device import DEVICE, Net, loader


class Resumed(Net):
    """Draws random numbers on the device and in the workers of its loader."""

    def __init__(self):
        super().__init__(dropout=0.5)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return super().training_step((x + 0.01 * torch.randn_like(x), y), batch_idx)

    def train_dataloader(self):
        return loader(96, shuffle=True, num_workers=2, persistent_workers=True, collate_fn=noisy)


def noisy(rows):
    x, y = torch.utils.data.default_collate(rows)
    return x + 0.01 * torch.randn(x.shape), y


def shared_device():
    """Return an accelerator whose two ranks use the first device."""
    if DEVICE == "cpu":
        return "cpu"
    from geartrain_cuda import CUDAAccelerator

    class SharedGPU(CUDAAccelerator):
        @staticmethod
        def device_count():
            return 2

        @gt.hookimpl
        def setup_device(self, run, local_rank):
            return super().setup_device(run=run, local_rank=0)

    return SharedGPU()


class Reports(Net):
    """Keeps the backend of the process group."""

    backend = None

    def on_train_start(self):
        self.backend = torch.distributed.get_backend()


def train(strategy, ranks, options, batch_size):
    """Train in this rank; return the backend and the weights."""
    net = Reports()
    gt.Trainer(
        accelerator=DEVICE if ranks == 1 else shared_device(),
        devices=ranks,
        strategy=strategy,
        strategy_options=options,
        max_epochs=2,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
        seed=1,
    ).fit(net, loader(batch_size=batch_size))
    return net.backend, {name: tensor.cpu() for name, tensor in net.state_dict().items()}


if __name__ == "__main__":
    file, *arguments = json.loads(sys.argv[1])
    torch.save(train(*arguments), file)
