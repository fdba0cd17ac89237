"""Find the points that lie in a circle. Replace the network and the data with yours."""

from __future__ import annotations

import geartrain as gt
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class MineModule(gt.Module):
    """Classify points: points ``[batch, 2]`` -> logits ``[batch]``, positive inside the circle.

    Args:
        hidden: units in the hidden layer.
        lr: Adam's learning rate.
    """

    def __init__(self, hidden: int = 32, lr: float = 0.01) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, 1), nn.Flatten(0)
        )

    def forward(self, points: Tensor) -> Tensor:
        logits: Tensor = self.net(points)
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        points, inside = batch
        loss = functional.binary_cross_entropy_with_logits(self(points), inside)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        points, inside = batch
        correct = (self(points) > 0) == (inside > 0)
        # sync_dist: with several processes, the mean over all of them.
        self.log("val_acc", correct.float().mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class MineData(gt.DataModule):
    """Random points of a square, half of them in a circle; the validation points are new.

    Args:
        batch_size: points in one batch of one process.
    """

    def __init__(self, batch_size: int = 32) -> None:
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(random_points(1000, seed=0), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(random_points(500, seed=1), batch_size=self.batch_size)


def random_points(n: int, seed: int) -> TensorDataset:
    """Return ``n`` points ``[n, 2]`` between -1 and 1, and 1.0 for each point in the circle."""
    points = 2 * torch.rand(n, 2, generator=torch.Generator().manual_seed(seed)) - 1
    return TensorDataset(points, (points.norm(dim=1) < 0.8).float())


if __name__ == "__main__":
    gt.cli(MineModule, MineData)
