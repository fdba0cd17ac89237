"""Compare the bits of 40 trainings before and after a change of the loop.

``python tests/tools/same_weights.py > before.json`` in one tree, then in the other
``python tests/tools/same_weights.py --against before.json``. The table is strategy x accumulation x
precision x what is added. Both trees need their own environment, with the same torch.
"""

import argparse
import hashlib
import itertools
import json
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn

import geartrain as gt
from geartrain.callbacks import EMA, ModelCheckpoint, StochasticWeightAveraging
from geartrain.testing import ThreadRanks

ADDED = {
    "nothing": dict,
    "clipping": lambda: {"gradient_clip_val": 0.1},
    "ema": lambda: {"callbacks": [EMA(decay=0.9)]},
    "swa": lambda: {"callbacks": [StochasticWeightAveraging(0.05, 1)]},
    "resume": dict,
}
TABLE = list(itertools.product(("single", "ranks"), (1, 3), ("32-true", "bf16-mixed"), ADDED))


class Net(gt.Module):
    """Has BatchNorm, dropout, two groups of parameters and a schedule by steps."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2)
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.layers(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.layers(x), y), sync_dist=True)

    def configure_optimizers(self):
        groups = [
            {"params": self.layers[0].parameters()},
            {"params": self.layers[1:].parameters(), "lr": 0.01},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.02)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(count):
    random = torch.Generator().manual_seed(5)
    x = torch.randn(count, 6, generator=random)
    data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    return torch.utils.data.DataLoader(data, 8, shuffle=count > 40)


def train(strategy, accumulated, precision, added, folder):
    """Return a digest of the weights after 3 epochs, or 1 and, in a new process's way, 2 more."""
    epochs, path = [3] if added != "resume" else [1, 3], None
    for number in epochs:
        options = {
            **({"strategy": ThreadRanks(2), "devices": 2} if strategy == "ranks" else {}),
            "callbacks": [ModelCheckpoint()],
            **ADDED[added](),
        }
        trainer = gt.Trainer(
            accelerator="cpu",
            seed=3,
            max_epochs=number,
            precision=precision,
            accumulate_grad_batches=accumulated,
            enable_progress_bar=False,
            output=folder,
            **options,
        )
        module = Net()
        trainer.fit(module, loader(90), loader(24), ckpt_path=path)
        path = "last"
    state = [tensor.numpy().tobytes() for tensor in module.state_dict().values()]
    return hashlib.sha256(b"".join(state)).hexdigest()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--against", type=Path, help="the file of the other tree")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found = {}
    for row in TABLE:
        with tempfile.TemporaryDirectory() as folder:
            found[" ".join(map(str, row))] = train(*row, Path(folder) / "run")
    if options.against is None:
        print(json.dumps(found, indent=2))
        return
    before = json.loads(options.against.read_text(encoding="utf-8"))
    differ = [row for row, digest in found.items() if before.get(row) != digest]
    print(f"{len(found) - len(differ)} of {len(found)} trainings have the same bits")
    if differ:
        sys.exit(f"these differ: {', '.join(differ)}")


if __name__ == "__main__":
    main()
