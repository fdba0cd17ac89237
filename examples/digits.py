"""Handwritten digits: the 1,797 images of 8 × 8 pixels in scikit-learn's wheel.

geartrain fit examples/digits.py --max-epochs 20 --seed 1
python examples/digits.py --max-epochs 20 --seed 1 --model.hidden 256
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt


class Digits(gt.Module):
    """A small convolutional network from images ``[batch, 1, 8, 8]`` to logits ``[batch, 10]``.

    Args:
        hidden: units in the hidden layer.
        lr: Adam's learning rate.
    """

    def __init__(self, hidden: int = 128, lr: float = 2e-3) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, hidden),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(hidden, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.net(images)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = functional.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        logits = self(images)
        self.log("val_loss", functional.cross_entropy(logits, labels), sync_dist=True)
        self.log(
            "val_acc",
            (logits.argmax(dim=1) == labels).float().mean(),
            prog_bar=True,
            sync_dist=True,
        )

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).argmax(dim=1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class DigitsData(gt.DataModule):
    """Four fifths for training, one fifth for validation, test and prediction.

    Args:
        batch_size: samples in one batch of one process.
    """

    def __init__(self, batch_size: int = 64) -> None:
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        labels = torch.tensor(digits.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        held_out, kept = order[:360], order[360:]
        self.train = TensorDataset(images[kept], labels[kept])
        self.val = TensorDataset(images[held_out], labels[held_out])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=256)

    test_dataloader = predict_dataloader = val_dataloader


if __name__ == "__main__":
    gt.cli(Digits, DigitsData)
