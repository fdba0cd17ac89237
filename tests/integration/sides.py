"""A small network that learns on which side of a plane a point lies; it prints its device."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt


class Sides(gt.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        assert x.device == y.device == self.trainer.run.device == next(self.parameters()).device
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(dim=1) == y).float().mean())

    def on_train_end(self):
        print("trained on", next(self.parameters()).device)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Points(gt.DataModule):
    def train_dataloader(self):
        x = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x, (x.sum(dim=1) > 0).long()), batch_size=16)

    val_dataloader = train_dataloader


if __name__ == "__main__":
    gt.cli(Sides, Points)
