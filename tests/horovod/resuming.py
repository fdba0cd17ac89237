"""Fits that stop and resume, in one program: ``resuming.py FOLDER RANKS``.

With two ranks each case trains without a stop, and again in two runs, of which the second resumes
from a checkpoint of the first. One case resumes from a checkpoint of ddp. With one rank a run
resumes from a checkpoint of two ranks.
"""

import gc
import sys
import warnings
from pathlib import Path

import torch
import torch._dynamo  # which optimizers import
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import lr_scheduler as lr
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt
from geartrain import hookimpl
from geartrain.callbacks import ModelCheckpoint

FOLDER, RANKS = Path(sys.argv[1]), int(sys.argv[2])
RATE = 0.02


class Net(gt.Module):
    """Dropout, BatchNorm, and one or two optimizers, each with a nested schedule by steps."""

    def __init__(self, optimizers=1):
        super().__init__()
        torch.manual_seed(0)
        self.optimizers_ = optimizers
        self.layers = nn.Sequential(
            nn.Linear(3, 6), nn.Dropout(0.3), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 1)
        )

    def training_step(self, batch, batch_idx):
        # So small that no gradient overflows float16.
        loss = mse_loss(self.layers(batch[0]), batch[1]) * 0.1
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        parameters = list(self.parameters())
        parts = [parameters] if self.optimizers_ == 1 else [parameters[:2], parameters[2:]]
        made = [torch.optim.AdamW(part, lr=RATE) for part in parts]
        return [
            {"optimizer": one, "lr_scheduler": {"scheduler": schedule(one), "interval": "step"}}
            for one in made
        ]


def schedule(optimizer):
    return lr.SequentialLR(
        optimizer,
        [
            lr.LinearLR(optimizer, 0.2, total_iters=3),
            lr.CosineAnnealingLR(optimizer, 9, eta_min=0.002),
        ],
        [3],
    )


class Rates:
    """Records each step's learning rates."""

    def __init__(self):
        self.seen = []

    @hookimpl
    def on_step_end(self, run):
        self.seen.append(
            [group["lr"] for optimizer in run.optimizers for group in optimizer.param_groups]
        )


def data():
    x = torch.randn(44, 3, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True).sin()), 4, shuffle=True)


def fit(folder, epochs, path=None, make=Net, own=None, strategy="horovod", **options):
    """Run one fit; return its trainer and its results."""
    steps = FOLDER / folder / "steps"
    rates, every = (
        Rates(),
        ModelCheckpoint(dirpath=steps, filename="{step}", every_n_train_steps=2, save_top_k=-1),
    )
    trainer = gt.Trainer(
        strategy=strategy,
        strategy_options=own,
        accelerator="cpu",
        devices=RANKS,
        max_epochs=epochs,
        seed=5,
        output=FOLDER / folder / "run",
        enable_progress_bar=False,
        plugins=[rates, every],
        **options,
    )
    module = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, data(), ckpt_path=path)
    messages = [str(one.message) for one in caught]
    messages = [text for text in messages if "checkpoint" in text or ".ckpt" in text]
    return trainer, {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "optimizers": [optimizer.state_dict() for optimizer in trainer.run.optimizers],
        "schedulers": [one.scheduler.state_dict() for one in trainer.run.schedulers],
        "metrics": dict(trainer.run.metrics),
        "step": trainer.global_step,
        "rates": rates.seen,
        "warnings": messages,
    }


#: The options of ``fit`` by case.
CASES = {
    "plain": {},
    "not scaled": {"own": {"scale_lr": False}},
    "16-mixed": {"precision": "16-mixed"},
    "two optimizers": {"make": lambda: Net(2)},
    "in groups, in float16": {"own": {"groups": 2, "compression": "fp16"}},
    "horovod's optimizer": {"own": {"distributed_optimizer": True}, "accumulate_grad_batches": 2},
}


def both(name, case):
    """Run two epochs without a stop, and resume within the first; one case also resumes between."""
    _, whole = fit(f"{name} whole", 2, **case)
    _, within = fit(f"{name} within", 2, FOLDER / f"{name} whole" / "steps" / "step=2.ckpt", **case)
    if name != "plain":
        return {"whole": whole, "within": within}
    fit("plain rest", 1)
    return {"whole": whole, "within": within, "rest": fit("plain rest", 2, "last")[1]}


def main():
    kept = {}
    if RANKS == 2:
        for name, case in CASES.items():
            print("case", name, flush=True)
            kept[name] = both(name, case)
        fit("ddp", 1, strategy="ddp")
        _, kept["was ddp's"] = fit("ddp", 2, "last")
        trainer, kept["process set"] = fit("set", 2, own={"process_set": [1, 0]})
    else:
        trainer, kept["two became one"] = fit(
            "shrunk", 2, FOLDER / "plain whole" / "steps" / "step=6.ckpt"
        )
    torch.save(kept, FOLDER / f"kept-{RANKS}-{trainer.global_rank}.pt")


if __name__ == "__main__":
    gc.freeze()  # each run collects garbage at its end
    main()
