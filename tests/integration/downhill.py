"""A target with a known result: the loss falls by 3 per unit of ``w[0]`` and 4 per ``w[1]``.

The gradient is always (-3, -4), with norm 5, so n steps of SGD from (0, 0) end at
``lr · n · (3, 4)``.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader

import geartrain as gt


class Downhill(gt.Module):
    def __init__(self, lr: float = 0.5):
        super().__init__()
        print("the module is made")  # tests that nothing was started look for this line
        self.lr = lr
        self.w = nn.Parameter(torch.zeros(2))

    def training_step(self, batch, batch_idx):
        loss = -(self.w * torch.tensor([3.0, 4.0])).sum()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class FourBatches(gt.DataModule):
    def train_dataloader(self):
        return DataLoader(torch.zeros(4, 1))


if __name__ == "__main__":
    gt.cli(Downhill, FourBatches)
