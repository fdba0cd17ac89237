"""The target of these tests: a regression on three numbers. Each test gets a copy in its folder."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt


class Net(gt.Module):
    """A small regression.

    Args:
        hidden: units in the hidden layer.
        lr: the learning rate.
    """

    def __init__(self, hidden: int = 4, lr: float = 0.1):
        super().__init__()
        print("the module is made")
        self.lr = lr
        self.layers = nn.Sequential(
            nn.Linear(3, hidden), nn.Tanh(), nn.Dropout(0.1), nn.Linear(hidden, 1)
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.layers(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.layers(x), y))

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        predicted = self.layers(batch[0])
        print("predicted", list(predicted.shape))
        return predicted

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Data(gt.DataModule):
    """Samples of a regression, 16 by default.

    Args:
        batch_size: samples in one batch.
    """

    def __init__(self, batch_size: int = 4, samples: int = 16):
        print("the data is made")
        x = torch.linspace(-1, 1, samples * 3).reshape(samples, 3)
        self.samples = TensorDataset(x, x.sum(dim=1, keepdim=True).sin())
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(self.samples, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.samples, batch_size=self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


if __name__ == "__main__":
    gt.cli(Net, Data)
