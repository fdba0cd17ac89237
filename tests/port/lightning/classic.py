"""As one wrote it for Lightning 1.x: one import, everything behind ``pl``."""

# ruff: noqa
# fmt: off

import os, sys  # both on one line

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


class Data(pl.LightningDataModule):
    def setup(self, stage=None):
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        self.data = TensorDataset(x, x.sum(1, keepdim=True))

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=8)

    def test_dataloader(self):
        return DataLoader(self.data, batch_size=8)


class Net(pl.LightningModule):
    def __init__(self, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(4, 1)  # all there is

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self(x), y)
        return {"loss": loss}

    def training_epoch_end(self, outputs):
        self.log("train_loss", torch.stack([o["loss"] for o in outputs]).mean())

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_loss", torch.nn.functional.mse_loss(self(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Counter(pl.Callback):
    epochs = 0

    def on_train_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule"):
        self.epochs += 1


if __name__ == "__main__":
    pl.seed_everything(1)
    counter = Counter()
    model, data = Net(), Data()
    trainer = pl.Trainer(
        gpus=0,  # none here
        max_epochs=3,
        logger=False,  # it prints
        checkpoint_callback=False,
        weights_summary=None,
        progress_bar_refresh_rate=0,  # no bar
        callbacks=[counter],
        terminate_on_nan=True,
        replace_sampler_ddp=True,  # the default
    )
    trainer.fit(model, datamodule=data)
    loss = trainer.callback_metrics["train_loss"].item()
    results = trainer.test(model, datamodule=data, verbose=False)  # the same module and data
    print("learns", bool(results[0]["test_loss"] < loss))
    print("epochs", counter.epochs, os.path.basename(sys.argv[0]))
