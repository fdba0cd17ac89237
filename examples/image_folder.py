r"""Classification of images in a folder, ``ROOT/CLASS/*.jpg`` or ``.png``, such as Caltech-101.

geartrain fit examples/image_folder.py --data.root 101_ObjectCategories --model.classes 102 \
    --max-epochs 50 --data.num_workers 4
geartrain fit examples/image_folder.py --data.root ROOT --model.classes 5 --strategy dp --devices 2
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from PIL import Image
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import geartrain as gt

SUFFIXES = {".jpg", ".jpeg", ".png"}


class Images(Dataset):
    """Images ``[3, size, size]`` with values around 0, and the numbers of their classes.

    Args:
        files: paths and class numbers.
        size: pixels per side.
        vary: use a random part of each image, and mirror half of the images.
    """

    def __init__(self, files: list[tuple[Path, int]], size: int, vary: bool) -> None:
        self.files, self.size, self.vary = files, size, vary

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[index]
        try:
            with Image.open(path) as file:
                image = file.convert("RGB")
        except OSError as error:
            raise gt.TrainingError(
                f"{path} cannot be read: {error}. Fix: remove it, or save it again"
            ) from error
        image = image.resize(
            (self.size, self.size), Image.Resampling.BILINEAR, box=self.part(*image.size)
        )
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(
            self.size, self.size, 3
        )
        pixels = (pixels.permute(2, 0, 1) / 255 - 0.5) / 0.25
        return (pixels.flip(2) if self.vary and torch.rand(()) < 0.5 else pixels), label

    def part(self, width: int, height: int) -> tuple[float, float, float, float]:
        """Return the square to use, as ``(left, upper, right, lower)``.

        It is the largest square in the middle, or a random one of at least half of its area.
        """
        # torch's generator has another seed in each loader worker; the seeds follow --seed.
        area, x, y = torch.rand(3).tolist() if self.vary else (1.0, 0.5, 0.5)
        side = min(width, height) * math.sqrt(0.5 + area / 2)
        left, upper = x * (width - side), y * (height - side)
        return left, upper, left + side, upper + side


class ImageFolder(gt.DataModule):
    """Four fifths of each class for training, one fifth for validation, test and prediction.

    Args:
        root: a folder with one folder per class.
        size: pixels per side.
        batch_size: images in one batch of one process.
        num_workers: processes that read images, for each loader.
        split_seed: the seed that chooses the held-out images.
    """

    def __init__(
        self,
        root: str,
        size: int = 64,
        batch_size: int = 32,
        num_workers: int = 0,
        split_seed: int = 0,
    ) -> None:
        self.size, self.batch_size, self.num_workers = size, batch_size, num_workers
        if not Path(root).is_dir():
            raise gt.UsageError(f"there is no folder {root}. Fix: pass --data.root FOLDER")
        self.classes = sorted(folder.name for folder in Path(root).iterdir() if folder.is_dir())
        if len(self.classes) < 2:
            raise gt.UsageError(
                f"{root} has {len(self.classes)} folders of images; each is a class. "
                "Fix: create at least two folders in it"
            )
        self.training: list[tuple[Path, int]] = []
        self.held_out: list[tuple[Path, int]] = []
        generator = torch.Generator().manual_seed(split_seed)
        for label, name in enumerate(self.classes):
            paths = sorted(
                path for path in (Path(root) / name).iterdir() if path.suffix.lower() in SUFFIXES
            )
            if len(paths) < 2:
                raise gt.UsageError(
                    f"{Path(root) / name} has {len(paths)} images ({', '.join(sorted(SUFFIXES))}). "
                    "Fix: add images, at least one for training and one for validation, "
                    "or remove the folder"
                )
            files = [
                (paths[i], label) for i in torch.randperm(len(paths), generator=generator).tolist()
            ]
            held_out = max(1, len(files) // 5)
            self.held_out += files[:held_out]
            self.training += files[held_out:]

    def prepare_data(self) -> None:
        """Read each file's header: a file that is not an image is an error before training."""
        for path, _ in [*self.training, *self.held_out]:
            try:
                Image.open(path).close()
            except OSError as error:
                raise gt.UsageError(
                    f"{path} is no image that Pillow reads. Fix: remove it, or save it again"
                ) from error

    def train_dataloader(self):
        images = Images(self.training, self.size, vary=True)
        return DataLoader(
            images, batch_size=self.batch_size, shuffle=True, num_workers=self.num_workers
        )

    def val_dataloader(self):
        return DataLoader(
            Images(self.held_out, self.size, vary=False),
            batch_size=self.batch_size,
            num_workers=self.num_workers,
        )

    test_dataloader = predict_dataloader = val_dataloader


class Residual(nn.Module):
    """Two convolutions with a shortcut.

    The input is ``[batch, before, n, n]`` and the output ``[batch, after, n/2, n/2]``.
    """

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(before, after, kernel_size=3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.shortcut = nn.Conv2d(before, after, kernel_size=1, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.path(x) + self.shortcut(x))


class Classifier(gt.Module):
    """A small residual network from images to classes.

    Images are ``[batch, 3, size, size]``, logits are ``[batch, classes]``.

    Args:
        classes: the number of classes.
        width: channels of the first layer; each of the three blocks doubles them.
        lr: AdamW's largest learning rate; it rises at the start and then falls to the end.
    """

    def __init__(self, classes: int, width: int = 16, lr: float = 5e-3) -> None:
        super().__init__()
        self.classes, self.lr = classes, lr
        self.net = nn.Sequential(
            nn.Conv2d(3, width, kernel_size=3, padding=1),
            nn.ReLU(),
            *(Residual(width << i, width << i + 1) for i in range(3)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width << 3, classes),
        )

    def setup(self, stage: str) -> None:
        found = getattr(self.trainer.datamodule, "classes", None)
        if found is not None and len(found) != self.classes:
            raise gt.UsageError(
                f"the folder has {len(found)} classes, the model {self.classes}. "
                f"Fix: --model.classes {len(found)}"
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
        """Return the probability of each class, ``[batch, classes]``."""
        return self(batch[0]).softmax(dim=1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.lr, total_steps=self.trainer.estimated_stepping_batches
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


if __name__ == "__main__":
    gt.cli(Classifier, ImageFolder)
