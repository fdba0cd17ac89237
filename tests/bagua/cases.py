"""Modules, data and trainings that the tests run in one process and in several."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt
from geartrain import hookimpl

SAMPLES = 48


def samples(n=SAMPLES):
    random = torch.Generator().manual_seed(1)
    x = torch.randn(n, 3, generator=random)
    return TensorDataset(x, x.sum(dim=1, keepdim=True).sin())


class Net(gt.Module):
    """A regression; the options are what a case is about."""

    def __init__(self, optimizer="sgd", frozen=False, freezes=False, unused=False, shared=False, deep=0):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 8)
        self.second, self.extra, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.deep = nn.Sequential(*[layer for _ in range(deep) for layer in (nn.Linear(8, 8), nn.Tanh())])
        self.optimizer, self.unused, self.freezes = optimizer, unused, freezes
        if frozen:
            self.first.requires_grad_(False)
        if shared:
            self.extra.weight = self.second.weight

    def forward(self, x, extra=True):
        hidden = self.deep(self.second(torch.tanh(self.first(x))).tanh())
        return self.last(self.extra(hidden) + hidden if extra else hidden)

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.freezes and batch_idx == 3:
            self.second.requires_grad_(False)
        extra = not self.unused or batch_idx % 2 == 0
        loss = nn.functional.mse_loss(self(x, extra), y)
        self.log("loss", loss, on_step=True, sync_dist=True)
        return loss * 0.01 if self.trainer.plan.precision.name == "16-mixed" else loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self(x), y), sync_dist=True)

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        if self.optimizer == "adam":
            return torch.optim.Adam(trained, lr=0.01)
        if self.optimizer == "two":
            return [torch.optim.SGD(trained[:3], lr=0.1), torch.optim.Adam(trained[3:], lr=0.01)]
        if self.optimizer == "lbfgs":
            return torch.optim.LBFGS(trained, lr=0.1, max_iter=4, tolerance_change=0, tolerance_grad=0)
        return torch.optim.SGD(trained, lr=0.1)


class Curve:
    """A logger that keeps one metric of each step."""

    def __init__(self):
        self.values = []

    @hookimpl
    def log_metrics(self, metrics):
        if "loss" in metrics:
            self.values.append(metrics["loss"])


def one_trainer(**options):
    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "num_sanity_val_steps": 0, "log_every_n_steps": 1, "max_epochs": 1}
    return gt.Trainer(**{**quiet, **options})


def bagua(devices=2, strategy=None, **options):
    return one_trainer(strategy="bagua", strategy_options=strategy or {}, devices=devices, **options)


#: name -> (what the module is made with, the trainer's options, the strategy's)
CASES = {
    "sgd": ({}, {}, {}),
    "adam": ({"optimizer": "adam"}, {"max_epochs": 2}, {}),
    "accumulating": ({"optimizer": "adam"}, {"accumulate_grad_batches": 4}, {}),
    "hundreds of buckets": ({"deep": 150}, {"max_steps": 3}, {"bucket_bytes": 4}),
    "buckets, accumulating": ({}, {"accumulate_grad_batches": 4}, {"bucket_bytes": 100}),
    "hierarchical": ({}, {}, {"hierarchical": True, "bucket_bytes": 100}),
    "frozen": ({"frozen": True}, {}, {}),
    "frozen later": ({"freezes": True}, {}, {}),
    "shared": ({"shared": True, "optimizer": "adam"}, {}, {"bucket_bytes": 100}),
    "unused": ({"unused": True, "optimizer": "adam"}, {}, {"find_unused_parameters": True, "bucket_bytes": 100}),
    # In the window's last micro-batch only: its gradients are of the others.
    "unused, accumulating": ({"unused": True}, {"accumulate_grad_batches": 2}, {"bucket_bytes": 100}),
    "clipped by norm": ({}, {"gradient_clip_val": 0.05}, {}),
    "clipped by value": ({}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {"bucket_bytes": 100}),
    "two optimizers": ({"optimizer": "two"}, {"accumulate_grad_batches": 2}, {}),
    "lbfgs": ({"optimizer": "lbfgs"}, {}, {"bucket_bytes": 100}),
    "64-true": ({}, {"precision": "64-true"}, {}),
}


def train(name, ranks=1):
    """Train a case on global batches of 8 samples; its trainer, the loss of each step and the weights."""
    made, options, of_bagua = CASES[name]
    module, curve = Net(**made), Curve()
    if ranks > 1:
        options = {**options, "strategy": "bagua", "strategy_options": of_bagua}
    trainer = one_trainer(devices=ranks, plugins=[curve], **options)
    trainer.fit(module, DataLoader(samples(), batch_size=8 // ranks))
    return trainer, curve.values, {key: value.clone() for key, value in module.state_dict().items()}
