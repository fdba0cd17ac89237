r"""Detection of drawn squares, discs and triangles, measured by COCO's mean average precision.

geartrain fit examples/detection.py --max-epochs 8 --seed 1 --data.num_workers 1
geartrain fit examples/detection.py --max-epochs 8 --seed 1 --strategy ddp --devices 2 \
    --data.batch_size 16
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

import geartrain as gt

SIZE, CELL = 64, 8  # pixels of an image, and of each cell of the grid that predicts boxes
CLASSES = ("square", "disc", "triangle")


class Shapes(Dataset):
    """Images ``[3, 64, 64]`` of one to three shapes; each index always draws the same image.

    A target has ``boxes`` ``[n, 4]``, left, upper, right, lower in pixels, and ``labels`` ``[n]``.
    """

    def __init__(self, indices: range) -> None:
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        random = torch.Generator().manual_seed(self.indices[index])
        image = 0.3 * torch.rand(3, 1, 1, generator=random) + torch.zeros(3, SIZE, SIZE)
        y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
        count = int(torch.randint(1, 4, (), generator=random))
        # Each shape is in another quarter of the image.
        quarters = torch.randperm(4, generator=random)[:count].tolist()
        labels = torch.randint(len(CLASSES), (count,), generator=random)
        boxes = []
        for quarter, label in zip(quarters, labels.tolist(), strict=True):
            side = int(torch.randint(12, 25, (), generator=random))
            left, top = torch.randint(SIZE // 2 - side + 1, (2,), generator=random).tolist()
            left, top = left + quarter % 2 * SIZE // 2, top + quarter // 2 * SIZE // 2
            across, down = (x - left + 0.5) / side, (y - top + 0.5) / side  # 0 to 1 in the box
            shape = (across >= 0) & (across <= 1) & (down >= 0) & (down <= 1)
            if CLASSES[label] == "disc":
                shape &= (across - 0.5) ** 2 + (down - 0.5) ** 2 <= 0.25
            elif CLASSES[label] == "triangle":
                shape &= (across - 0.5).abs() <= down / 2
            image[:, shape] = 0.4 + 0.6 * torch.rand(3, 1, generator=random)
            boxes.append([left, top, left + side, top + side])
        image += 0.05 * torch.randn(image.shape, generator=random)
        return image, {"boxes": torch.tensor(boxes, dtype=torch.float32), "labels": labels}


def collate(samples):
    """Return the images ``[batch, 3, 64, 64]``, and the targets as a list."""
    images, targets = zip(*samples, strict=True)
    return torch.stack(images), list(targets)


class ShapesData(gt.DataModule):
    """1,000 images for training and 250 others for validation and test.

    Args:
        batch_size: images in one batch of one process.
        num_workers: processes that draw images, for each loader.
    """

    def __init__(self, batch_size: int = 32, num_workers: int = 0) -> None:
        self.options = {"batch_size": batch_size, "num_workers": num_workers, "collate_fn": collate}

    def train_dataloader(self):
        return DataLoader(Shapes(range(1000)), shuffle=True, **self.options)

    def val_dataloader(self):
        return DataLoader(Shapes(range(1000, 1250)), **self.options)

    test_dataloader = val_dataloader


class MeanAveragePrecision(Metric):
    """COCO's average precision at an overlap of one half, as the mean over classes.

    If you have torchvision, take ``torchmetrics.detection.MeanAveragePrecision``, and log the
    entries of the dict that it computes.

    Args:
        classes: the number of classes.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.add_state("shapes", torch.zeros(classes, dtype=torch.long), dist_reduce_fx="sum")
        for name in ("scores", "labels", "hits"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, found, targets) -> None:
        """Match each target with the likeliest detections of one image after another."""
        for guess, target in zip(found, targets, strict=True):
            order = guess["scores"].argsort(descending=True)
            boxes, labels = guess["boxes"][order], guess["labels"][order]
            overlaps = overlap(boxes, target["boxes"])
            overlaps[labels[:, None] != target["labels"]] = 0
            hits = torch.zeros(len(boxes), device=boxes.device)
            for i, row in enumerate(overlaps):
                if row.max() >= 0.5:
                    hits[i] = 1
                    overlaps[:, row.argmax()] = 0  # later detections of the same shape are wrong
            self.shapes += torch.bincount(target["labels"], minlength=len(self.shapes))
            self.scores.append(guess["scores"][order])
            self.labels.append(labels)
            self.hits.append(hits)

    def compute(self) -> torch.Tensor:
        scores, labels, hits = map(dim_zero_cat, (self.scores, self.labels, self.hits))
        order = scores.argsort(descending=True, stable=True)
        recalls = torch.arange(101, device=scores.device) / 100
        results = []
        for label in self.shapes.nonzero().flatten():
            right = hits[order][labels[order] == label].cumsum(dim=0)
            precision = right / torch.arange(1, len(right) + 1, device=right.device)
            best = precision.flip(0).cummax(dim=0).values.flip(0)  # at this recall or a larger one
            place = torch.searchsorted(right / self.shapes[label], recalls)
            results.append(torch.cat([best, best.new_zeros(1)])[place].mean())
        return torch.stack(results).mean()


def overlap(boxes: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return intersection over union ``[n, m]`` of boxes ``[n, 4]`` and ``[m, 4]``."""
    corner = torch.maximum(boxes[:, None, :2], others[:, :2])
    shared = (torch.minimum(boxes[:, None, 2:], others[:, 2:]) - corner).clamp(min=0).prod(dim=2)
    areas, other = ((b[:, 2:] - b[:, :2]).prod(dim=1) for b in (boxes, others))
    return shared / (areas[:, None] + other - shared)


def block(before: int, after: int, stride: int) -> tuple[nn.Module, ...]:
    """Return a convolution with its normalisation, from ``before`` to ``after`` channels."""
    convolution = nn.Conv2d(before, after, kernel_size=3, stride=stride, padding=1, bias=False)
    return convolution, nn.BatchNorm2d(after), nn.ReLU()


class Detector(gt.Module):
    """Each cell of an 8 × 8 grid predicts the shape whose centre it contains.

    Images ``[batch, 3, 64, 64]`` become ``[batch, 8, 8, 3 + 4]``: logits of the classes, and the
    box as the centre's offset in the cell and the logarithm of its width and height, in cells.

    Args:
        width: channels of the first layer.
        lr: AdamW's largest learning rate; it rises at the start and then falls to the end.
    """

    def __init__(self, width: int = 16, lr: float = 1e-2) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            *block(3, width, stride=2),
            *block(width, 2 * width, stride=2),
            *block(2 * width, 4 * width, stride=2),
            *block(4 * width, 4 * width, stride=1),
            nn.Conv2d(4 * width, len(CLASSES) + 4, kernel_size=3, padding=1),
        )
        self.mean_ap = MeanAveragePrecision(len(CLASSES))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.net(images).permute(0, 2, 3, 1)

    def training_step(self, batch, batch_idx):
        images, targets = batch
        grid = self(images)
        boxes, labels = (torch.cat([t[name] for t in targets]) for name in ("boxes", "labels"))
        image = torch.cat([torch.full_like(t["labels"], i) for i, t in enumerate(targets)])
        centres = (boxes[:, :2] + boxes[:, 2:]) / 2 / CELL
        column, row = centres.long().unbind(dim=1)

        wanted = torch.zeros_like(grid[..., : len(CLASSES)])
        wanted[image, row, column, labels] = 1.0
        logits, found = grid[..., : len(CLASSES)], grid[image, row, column, len(CLASSES) :]
        class_loss = functional.binary_cross_entropy_with_logits(logits, wanted, reduction="sum")
        sizes = torch.log((boxes[:, 2:] - boxes[:, :2]) / CELL)
        box_loss = functional.l1_loss(found, torch.cat([centres % 1, sizes], 1), reduction="sum")
        self.log("class_loss", class_loss / len(labels), batch_size=len(labels))
        self.log("box_loss", box_loss / len(labels), prog_bar=True, batch_size=len(labels))
        # Images have unequal numbers of shapes: every shape counts equally, also over ranks.
        return {"loss": class_loss + box_loss, "weight": len(labels)}

    def detect(self, images: torch.Tensor, most: int = 10) -> list[dict[str, torch.Tensor]]:
        """Return ``boxes``, ``scores`` and ``labels`` of the ``most`` likely shapes per image."""
        grid = self(images).flatten(1, 2)
        scores, labels = grid[..., : len(CLASSES)].sigmoid().max(dim=2)
        scores, cells = scores.topk(most, dim=1)
        found = []
        for row, score, label, cell in zip(grid, scores, labels, cells, strict=True):
            offsets, sizes = row[cell, len(CLASSES) :].split(2, dim=1)
            centres = torch.stack([cell % (SIZE // CELL), cell // (SIZE // CELL)], dim=1) + offsets
            boxes = torch.cat([centres - sizes.exp() / 2, centres + sizes.exp() / 2], dim=1) * CELL
            found.append({"boxes": boxes, "scores": score, "labels": label[cell]})
        return found

    def validation_step(self, batch, batch_idx):
        images, targets = batch
        self.mean_ap.update(self.detect(images), targets)
        self.log("val_map", self.mean_ap, prog_bar=True)  # of all images, also over ranks

    test_step = validation_step

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


if __name__ == "__main__":
    gt.cli(Detector, ShapesData)
