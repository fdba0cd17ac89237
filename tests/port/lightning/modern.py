"""As one writes it for Lightning 2.x."""

# ruff: noqa
# fmt: off

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,  # ends it
    LearningRateMonitor,
    RichModelSummary,
)
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def main() -> None:
    L.seed_everything(1, workers=True)
    x = torch.randn(64, 4)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    logger = CSVLogger("logs", name="net")
    trainer = L.Trainer(
        accelerator="cpu", devices=1, strategy="auto", max_epochs=50, logger=logger, log_every_n_steps=4, enable_progress_bar=False,
        callbacks=[EarlyStopping("val_loss", patience=1, min_delta=0.01), LearningRateMonitor(), RichModelSummary(max_depth=1)],
    )
    trainer.fit(Net(), loader, loader)
    print("stopped", trainer.current_epoch < 50)
    with open("logs/net/metrics.csv") as file:
        print("columns", "val_loss" in file.readline())


if __name__ == "__main__":
    main()
