"""A GAN of handwritten digits: two optimizers take turns, in manual optimisation.

The 1,797 real digits of 8 × 8 pixels are in scikit-learn's wheel.

geartrain fit examples/gan.py --max-epochs 24 --seed 1
geartrain fit examples/gan.py --max-epochs 24 --seed 1 --strategy ddp --devices 2
python examples/gan.py --max-epochs 24 --seed 1 --model.noise 32
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt


class GAN(gt.Module):
    """A generator and a discriminator.

    The generator maps noise ``[batch, noise]`` to images ``[batch, 64]``. The discriminator maps
    images to logits ``[batch, 1]``, which are above 0 for real images.

    Args:
        noise: random numbers per image.
        hidden: units in each hidden layer.
        lr: Adam's learning rate.

    Source: Goodfellow et al. 2014, https://arxiv.org/abs/1406.2661
    """

    def __init__(self, noise: int = 16, hidden: int = 256, lr: float = 2e-3) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.noise, self.lr = noise, lr
        self.generator = nn.Sequential(
            nn.Linear(noise, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 64),
            nn.Sigmoid(),
        )
        self.discriminator = nn.Sequential(
            nn.Linear(64, hidden),
            nn.LeakyReLU(0.2),
            nn.Linear(hidden, hidden),
            nn.LeakyReLU(0.2),
            nn.Linear(hidden, 1),
        )

    def forward(self, count: int) -> torch.Tensor:
        return self.generator(torch.randn(count, self.noise, device=self.device))

    def training_step(self, batch, batch_idx):
        (real,) = batch
        of_generator, of_discriminator = self.optimizers()

        with self.toggled_optimizer(of_discriminator):  # the generator needs no gradients here
            loss = (self.judge(real, 1.0) + self.judge(self(len(real)), 0.0)) / 2
            of_discriminator.zero_grad()
            self.manual_backward(loss)
            of_discriminator.step()
            self.log("discriminator_loss", loss)

        with self.toggled_optimizer(of_generator):  # gradients pass the discriminator unchanged
            loss = self.judge(self(len(real)), 1.0)
            of_generator.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(of_generator, gradient_clip_val=5.0)
            of_generator.step()
            self.log("generator_loss", loss)

    def judge(self, images: torch.Tensor, verdict: float) -> torch.Tensor:
        """Return the discriminator's loss for this verdict."""
        logits = self.discriminator(images)
        return binary_cross_entropy_with_logits(logits, torch.full_like(logits, verdict))

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():  # in manual optimisation the module steps them
            scheduler.step()

    def validation_step(self, batch, batch_idx):
        (real,) = batch
        made = self(len(real))
        # Distances of mean and standard deviation per pixel; both are 0 for a perfect generator.
        self.log("mean_gap", (made.mean(dim=0) - real.mean(dim=0)).abs().mean(), sync_dist=True)
        self.log(
            "spread_gap",
            (made.std(dim=0) - real.std(dim=0)).abs().mean(),
            prog_bar=True,
            sync_dist=True,
        )

    def predict_step(self, batch, batch_idx):
        return self(len(batch[0]))

    def configure_optimizers(self):
        optimizers = [
            torch.optim.Adam(part.parameters(), lr=self.lr, betas=(0.5, 0.999))
            for part in (self.generator, self.discriminator)
        ]
        return optimizers, [
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97) for optimizer in optimizers
        ]


class DigitsData(gt.DataModule):
    """All digits, as ``[64]`` numbers between 0 and 1.

    Args:
        batch_size: images in one batch of one process.
    """

    def __init__(self, batch_size: int = 32) -> None:
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        self.images = TensorDataset(torch.tensor(load_digits().data, dtype=torch.float32) / 16)

    def train_dataloader(self):
        return DataLoader(self.images, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.images, batch_size=len(self.images))

    predict_dataloader = val_dataloader


if __name__ == "__main__":
    gt.cli(GAN, DigitsData)
