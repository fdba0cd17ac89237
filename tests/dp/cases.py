"""Modules and trainings that the tests run under single, dp, ddp and ddp2."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import geartrain as gt

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
from regression import Curve, Net, one_trainer, samples, weights


class Contrastive(gt.Module):
    """A module with a loss over the whole batch: it compares each sample with all targets."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 4)

    def part(self, batch):
        x, y = batch
        return {"embedding": self.net(x), "target": torch.cat([y, -y, x[:, :2]], dim=1)}

    def loss(self, name, outputs):
        embedding = torch.cat([out["embedding"] for out in outputs])
        target = torch.cat([out["target"] for out in outputs])
        loss = nn.functional.cross_entropy(
            embedding @ target.T, torch.arange(len(embedding), device=embedding.device)
        )
        self.log(name, loss, on_step=name == "loss", on_epoch=True, sync_dist=True)
        self.log(f"{name} parts", float(len(outputs)), reduce_fx="max")
        return loss

    def training_step(self, batch, batch_idx):
        return self.part(batch)

    def training_step_end(self, outputs):
        return {"loss": self.loss("loss", outputs)}

    def validation_step(self, batch, batch_idx):
        return self.part(batch)

    def validation_step_end(self, outputs):
        return self.loss("val_loss", outputs)

    def test_step(self, batch, batch_idx):
        return self.part(batch)

    def test_step_end(self, outputs):
        return self.loss("test_loss", outputs)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def dp(devices=2, **options):
    return one_trainer(strategy="dp", devices=devices, **options)


#: name -> (the module's arguments, the trainer's options, samples per batch, devices)
CASES = {
    "sgd": ({}, {}, 8, 2),
    "adam": ({"optimizer": "adam"}, {"max_epochs": 2}, 8, 2),
    "accumulating": ({"optimizer": "adam"}, {"accumulate_grad_batches": 4}, 4, 2),
    "3 samples on 2 devices": ({}, {}, 3, 2),
    "5 samples on 4 devices": ({"optimizer": "adam"}, {}, 5, 4),
    "1 sample on 2 devices": ({}, {}, 1, 2),
    "unused parameters": ({"unused": True, "optimizer": "adam"}, {}, 7, 2),
    "clipped by norm": ({}, {"gradient_clip_val": 0.05}, 7, 3),
    "clipped by value": ({}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, 8, 2),
    "two optimizers": ({"optimizer": "two"}, {"accumulate_grad_batches": 2}, 5, 2),
    "lbfgs": ({"optimizer": "lbfgs"}, {}, 8, 2),
    "64 bits": ({"optimizer": "adam"}, {"precision": "64-true"}, 7, 2),
}


def train(name, strategy, batch_size=None, **more):
    """Train a case; return its trainer, the loss of each step and the weights."""
    made, options, size, devices = CASES[name]
    module, curve = Net(**made), Curve()
    trainer = one_trainer(
        strategy=strategy,
        devices=1 if strategy == "single" else devices,
        plugins=[curve],
        **{**options, **more},
    )
    trainer.fit(module, DataLoader(samples(), batch_size=batch_size or size))
    return trainer, curve.values, weights(module)
