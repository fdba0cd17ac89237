"""A regression with data and a trainer, for tests of strategies in one and in several processes."""

from functools import partial

import torch
from torch import nn
from torch.utils.data import TensorDataset

import geartrain as gt
from geartrain import hookimpl

SAMPLES = 48


def samples(n=SAMPLES):
    random = torch.Generator().manual_seed(1)
    x = torch.randn(n, 3, generator=random)
    return TensorDataset(x, x.sum(dim=1, keepdim=True).sin())


class Net(gt.Module):
    """A regression on three numbers.

    Args:
        optimizer: ``"sgd"``, ``"adam"``, ``"two"`` or ``"lbfgs"``.
        frozen: freeze the first layer.
        freezes: freeze the second layer from the fourth batch on.
        unused: every second batch does not use the layer ``extra``.
        shared: two layers share one weight.
        norm: use BatchNorm.
        deep: the number of additional layers.
    """

    def __init__(
        self,
        optimizer="sgd",
        frozen=False,
        freezes=False,
        unused=False,
        shared=False,
        norm=False,
        deep=0,
    ):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 8)
        self.second, self.extra, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.deep = nn.Sequential(
            *[layer for _ in range(deep) for layer in (nn.Linear(8, 8), nn.Tanh())]
        )
        self.optimizer, self.unused, self.freezes = optimizer, unused, freezes
        if frozen:
            self.first.requires_grad_(False)
        if shared:
            self.extra.weight = self.second.weight

    def forward(self, x, extra=True):
        hidden = self.deep(self.second(self.norm(torch.tanh(self.first(x)))).tanh())
        return self.last(self.extra(hidden) + hidden if extra else hidden)

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.freezes and batch_idx == 3:
            self.second.requires_grad_(False)
        loss = nn.functional.mse_loss(self(x, not self.unused or batch_idx % 2 == 0), y)
        self.log("loss", loss, on_step=True, sync_dist=True)
        # Smaller in 16-mixed: gradients must not overflow float16 at the scaler's first scale.
        return loss * 0.01 if self.trainer.plan.precision.name == "16-mixed" else loss

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
            return torch.optim.LBFGS(
                trained, lr=0.1, max_iter=4, tolerance_change=0, tolerance_grad=0
            )
        return torch.optim.SGD(trained, lr=0.1)


class Saves(Net):
    """Save on rank 0 alone. Under a sharded strategy the file would contain one shard."""

    def __init__(self, get):
        super().__init__()
        self.get = get

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.is_global_zero:
            torch.save(self.get(self), "weights.pt")


#: Modules that save, by name.
SAVES = {
    "saves weights": partial(Saves, lambda module: module.state_dict()),
    "saves parameter": partial(Saves, lambda module: module.first.weight),
}


class Contrast(gt.Module):
    """Pairs of numbers find each other among those of all ranks.

    Args:
        local: each rank's loss is that of its samples, not of all.
    """

    def __init__(self, local=False):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.local = nn.Linear(3, 4), local

    def training_step(self, batch, batch_idx):
        x, _ = batch
        a, b = self.net(x), self.net(x + 0.5)
        every = torch.cat(list(self.all_gather(b, sync_grads=True)))
        if self.local:
            first = self.global_rank * len(x)
        else:
            first, a = 0, torch.cat(list(self.all_gather(a, sync_grads=True)))
        own_parameters = self.net.weight.square().mean()
        return own_parameters + nn.functional.cross_entropy(
            a @ every.T, torch.arange(first, first + len(a))
        )

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Curve:
    """A logger that keeps the named metrics of each step; the default is the loss."""

    def __init__(self, *names):
        self.names = names or ("loss",)
        self.values = []

    @hookimpl
    def log_metrics(self, metrics):
        self.values += [metrics[name] for name in self.names if name in metrics]


def one_trainer(**options):
    quiet = {
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "max_epochs": 1,
    }
    return gt.Trainer(**{**quiet, **options})


def weights(module):
    return {key: value.clone() for key, value in module.state_dict().items()}
