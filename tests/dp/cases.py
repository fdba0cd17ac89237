"""Modules, data and trainings that the tests run under single, dp, ddp and ddp2."""

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

    def __init__(self, optimizer="sgd", frozen=False, unused=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.extra, self.last = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.optimizer, self.unused = optimizer, unused
        if frozen:
            self.first.requires_grad_(False)

    def forward(self, x, extra=True):
        hidden = self.second(torch.tanh(self.first(x))).tanh()
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
        self.log("best", errors.min(), reduce_fx="min", sync_dist=True)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_loss", nn.functional.mse_loss(self(x), y), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return {"prediction": self(batch[0]), "sum": batch[0].sum(dim=1)}

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        if self.optimizer == "adam":
            return torch.optim.Adam(trained, lr=0.01)
        if self.optimizer == "two":
            return [torch.optim.SGD(trained[:3], lr=0.1), torch.optim.Adam(trained[3:], lr=0.01)]
        if self.optimizer == "lbfgs":
            return torch.optim.LBFGS(trained, lr=0.1, max_iter=4, tolerance_change=0, tolerance_grad=0)
        return torch.optim.SGD(trained, lr=0.1)


class Contrastive(gt.Module):
    """Each sample must find its own target among all of the batch: a loss that no part of the batch can compute."""

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
        loss = nn.functional.cross_entropy(embedding @ target.T, torch.arange(len(embedding), device=embedding.device))
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


class Curve:
    """A logger that keeps one metric of each step."""

    def __init__(self, *names):
        self.names = names or ("loss",)
        self.values = []

    @hookimpl
    def log_metrics(self, metrics):
        self.values += [metrics[name] for name in self.names if name in metrics]


def one_trainer(**options):
    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "num_sanity_val_steps": 0, "log_every_n_steps": 1, "max_epochs": 1}
    return gt.Trainer(**{**quiet, **options})


def dp(devices=2, **options):
    return one_trainer(strategy="dp", devices=devices, **options)


def weights(module):
    return {key: value.clone() for key, value in module.state_dict().items()}


#: name -> (what the module is made with, the trainer's options, samples in a batch, devices)
CASES = {
    "sgd": ({}, {}, 8, 2),
    "adam": ({"optimizer": "adam"}, {"max_epochs": 2}, 8, 2),
    "accumulating": ({"optimizer": "adam"}, {"accumulate_grad_batches": 4}, 4, 2),
    "3 samples on 2 devices": ({}, {}, 3, 2),
    "5 samples on 4 devices": ({"optimizer": "adam"}, {}, 5, 4),
    "1 sample on 2 devices": ({}, {}, 1, 2),
    "frozen parameters": ({"frozen": True}, {}, 8, 2),
    "unused parameters": ({"unused": True, "optimizer": "adam"}, {}, 7, 2),
    "clipped by norm": ({}, {"gradient_clip_val": 0.05}, 7, 3),
    "clipped by value": ({}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, 8, 2),
    "two optimizers": ({"optimizer": "two"}, {"accumulate_grad_batches": 2}, 5, 2),
    "lbfgs": ({"optimizer": "lbfgs"}, {}, 8, 2),
    "64 bits": ({"optimizer": "adam"}, {"precision": "64-true"}, 7, 2),
}


def train(name, strategy, batch_size=None, **more):
    """Train a case; its trainer, the loss of each step and the weights."""
    made, options, size, devices = CASES[name]
    module, curve = Net(**made), Curve()
    trainer = one_trainer(strategy=strategy, devices=1 if strategy == "single" else devices, plugins=[curve], **{**options, **more})
    trainer.fit(module, DataLoader(samples(), batch_size=batch_size or size))
    return trainer, curve.values, weights(module)
