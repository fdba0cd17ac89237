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

    def __init__(self, optimizer="sgd", frozen=False, unused=False, norm=False):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.second, self.extra, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.optimizer, self.unused = optimizer, unused
        if frozen:
            self.first.requires_grad_(False)

    def forward(self, x, extra=True):
        hidden = self.second(self.norm(torch.tanh(self.first(x)))).tanh()
        return self.last(self.extra(hidden) + hidden if extra else hidden)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self(x, not self.unused or batch_idx % 2 == 0), y)
        self.log("loss", loss, on_step=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        errors = (self(x) - y).square()
        self.log("val_loss", errors.mean(), sync_dist=True)
        self.log("samples", float(len(x)), reduce_fx="sum", sync_dist=True)
        self.log("worst", errors.max(), reduce_fx="max", sync_dist=True)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_loss", nn.functional.mse_loss(self(x), y), sync_dist=True)

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        if self.optimizer == "adam":
            return torch.optim.Adam(trained, lr=0.01)
        if self.optimizer == "two":
            return [torch.optim.SGD(trained[:3], lr=0.1), torch.optim.Adam(trained[3:], lr=0.01)]
        if self.optimizer == "lbfgs":
            return torch.optim.LBFGS(trained, lr=0.1, max_iter=4, tolerance_change=0, tolerance_grad=0)
        return torch.optim.SGD(trained, lr=0.1)


class Gentle(Net):
    """Its gradients do not overflow float16 at the scaler's first scale."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * 0.01


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


def ddp(devices=2, **options):
    return one_trainer(strategy="ddp", devices=devices, **options)


#: name -> (what the module is made with, the trainer's options, the strategy's)
CASES = {
    "sgd": ({}, {}, {}),
    "adam": ({"optimizer": "adam"}, {"max_epochs": 2}, {}),
    "sgd accumulating": ({}, {"accumulate_grad_batches": 4}, {}),
    "adam accumulating": ({"optimizer": "adam"}, {"accumulate_grad_batches": 4}, {}),
    "many buckets": ({}, {}, {"bucket_cap_mb": 0.0001}),
    "many buckets, accumulating": ({"optimizer": "adam"}, {"accumulate_grad_batches": 2}, {"bucket_cap_mb": 0.0001}),
    "gradients as views": ({}, {"accumulate_grad_batches": 4}, {"gradient_as_bucket_view": True}),
    "static graph": ({}, {}, {"static_graph": True}),
    "frozen parameters": ({"frozen": True}, {}, {}),
    "unused parameters": ({"unused": True, "optimizer": "adam"}, {}, {"find_unused_parameters": True}),
    "clipped by norm": ({}, {"gradient_clip_val": 0.05}, {}),
    "clipped by value": ({}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {}),
    "two optimizers": ({"optimizer": "two"}, {"accumulate_grad_batches": 2}, {}),
    "lbfgs": ({"optimizer": "lbfgs"}, {}, {}),
}


def train(name, ranks=1):
    """Train a case on global batches of 8 samples; its trainer, the loss of each step and the weights."""
    made, options, of_ddp = CASES[name]
    module, curve = Net(**made), Curve()
    if ranks > 1:
        options = {**options, "strategy": "ddp", "strategy_options": of_ddp}
    trainer = one_trainer(devices=ranks, plugins=[curve], **options)
    trainer.fit(module, DataLoader(samples(), batch_size=8 // ranks))
    return trainer, curve.values, {key: value.clone() for key, value in module.state_dict().items()}
