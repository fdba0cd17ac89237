"""Code that the printed documentation omits: a module, data, and a Trainer for the CPU."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt


def data(samples=24, batch_size=8):
    """Return batches ``(x [batch, 4], y [batch])`` of three classes."""
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x[:, :3].argmax(dim=1)), batch_size=batch_size)


class Classifier(gt.Module):
    """A module whose steps a block may override."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.loss = nn.Linear(4, 3), nn.functional.cross_entropy

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.loss(self(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(**options):
    return gt.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 2,
            "enable_progress_bar": False,
            **options,
        }
    )


def learns(model, fitted, **more):
    """True if training lowers the module's cross-entropy on :func:`data`."""
    x, y = next(iter(data()))
    before = nn.functional.cross_entropy(model.layer(x), y).item()
    fitted.fit(model, data(), **more)
    return nn.functional.cross_entropy(model.layer(x), y).item() < before
