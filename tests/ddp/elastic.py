"""A program whose nodes may leave and come: it logs the samples of each step."""

import json
import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import geartrain as gt


class Numbered(Dataset):
    def __len__(self):
        return 120

    def __getitem__(self, index):
        return torch.full((4,), index / 120), index


class Net(gt.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        x, numbers = batch
        t = self.trainer
        line = [time.time(), t.world_size, t.current_epoch, t.global_step, numbers.tolist()]
        with open(f"steps-{os.getpid()}", "a") as file:
            print(json.dumps(line), file=file)
        if not os.path.exists("fast"):  # the test has seen nodes leave and come
            time.sleep(0.1)
        return self.layer(x).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return DataLoader(Numbered(), batch_size=1, shuffle=True)


if __name__ == "__main__":
    gt.cli(Net)
