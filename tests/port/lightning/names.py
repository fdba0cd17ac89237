"""Imports by name, some of them under another one, beside names that geartrain has too."""

# ruff: noqa
# fmt: off

import torch
from pytorch_lightning import LightningModule, Trainer as Runner, seed_everything
from pytorch_lightning.callbacks.base import Callback
from pytorch_lightning.callbacks.early_stopping import EarlyStopping
from pytorch_lightning.core.lightning import LightningModule as Base
from torch.nn import Module


class Layer(Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return x @ self.weight


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = Layer()

    def training_step(self, batch, batch_idx):
        gt = batch.sum(1)  # the ground truth
        loss = (self.layer(batch) - gt).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)


class Says(Callback):
    def on_train_end(self, trainer: Runner, pl_module: LightningModule) -> None:
        print("loss", bool(trainer.callback_metrics["loss"] < 0.1))


seed_everything(1)
loader = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=8)
trainer = Runner(num_processes=1, max_epochs=4, logger=None, checkpoint_callback=Says(), callbacks=[EarlyStopping("loss")])
trainer.fit(Net(), train_dataloader=loader)
print("base", issubclass(Net, Base))
