"""Fits with each algorithm on two ranks, and fits that resume from their checkpoints."""

import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader

from geartrain import hookimpl
from geartrain.callbacks import EMA, ModelCheckpoint
from geartrain.strategies import BaguaStrategy, QAdamOptimizer

from .cases import Net, one_trainer, samples

found = {}


class Own(Net):
    """A net with dropout and a scheduler; on rank 1 the third step's gradients overflow float16."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.drop = nn.Dropout(0.3)

    def forward(self, x, extra=True):
        return self.drop(super().forward(x, extra))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        mixed = self.trainer.plan.precision.name == "16-mixed"
        return loss * 1e6 if mixed and self.global_rank == 1 and batch_idx == 2 else loss

    def configure_optimizers(self):
        if self.optimizer == "qadam":
            made = QAdamOptimizer(self.parameters(), lr=0.01, warmup_steps=4)
        else:
            made = super().configure_optimizers()
        if isinstance(made, list):
            return made
        scheduler = torch.optim.lr_scheduler.StepLR(made, 2, 0.7)
        return {
            "optimizer": made,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def go(name, options, folder, path=None, epochs=2, optimizer="adam", plugins=(), **of_trainer):
    """Run one fit that writes into a folder, with a checkpoint every second step."""
    ema, module = EMA(0.7), Own(optimizer)
    every = ModelCheckpoint(
        dirpath=f"{folder}/steps", filename="{step}", every_n_train_steps=2, save_top_k=-1
    )
    strategy = BaguaStrategy(**options)
    trainer = one_trainer(
        devices=2,
        strategy=strategy,
        max_epochs=epochs,
        output=f"{folder}/run",
        seed=5,
        plugins=[ema, every, *plugins],
        **of_trainer,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(
            module,
            DataLoader(samples(), batch_size=4, shuffle=True),
            DataLoader(samples(7), batch_size=2),
            ckpt_path=path,
        )
    scaler = [
        part.plugin.state_dict() for part in trainer.run.hooks.parts if part.info.name == "16-mixed"
    ]
    found[name] = {
        # EMA's weights: it replaces the trained weights at the end.
        "weights": [parameter.detach().clone() for parameter in module.parameters()],
        "state": strategy.state_dict()["state"],
        "optimizers": [one.state_dict() for one in trainer.run.optimizers],
        "ema": ema.state_dict(),
        "scaler": scaler,
        "metrics": dict(trainer.run.metrics),
        "steps": [trainer.run.step, trainer.run.epoch],
        "warnings": [str(one.message) for one in caught if ".ckpt" in str(one.message)],
    }


#: name -> (the strategy's options, the options of the trainer and the module)
CASES = {
    "qadam": ({"algorithm": "qadam", "hierarchical": False}, {"optimizer": "qadam"}),
    "power_sgd": ({"algorithm": "power_sgd", "min_compression_rate": 1.0}, {}),
    "shift_one": (
        {"algorithm": "decentralized", "hierarchical": False, "peer_selection_mode": "shift_one"},
        {"optimizer": "two"},
    ),
    "decentralized, 16-mixed": (
        {"algorithm": "decentralized", "communication_interval": 2},
        {"precision": "16-mixed"},
    ),
    "low precision": (
        {"algorithm": "low_precision_decentralized", "hierarchical": False, "bucket_bytes": 100},
        {"accumulate_grad_batches": 2, "epochs": 3},
    ),
}


# --- async ----------------------------------------------------------------------------------------


class Copies(Own):
    """Adds a copy of its weights to checkpoints; records weights when all ranks have one model."""

    def __init__(self, ema):
        super().__init__("sgd")
        self.ema, self.copies, self.validated, self.after = ema, [], [], []

    def flat(self):
        return torch.cat([parameter.detach().flatten() for parameter in self.parameters()])

    def on_save_checkpoint(self, state):
        self.copies.append(self.flat())
        state["copy"] = self.flat()

    def validation_step(self, batch, batch_idx):
        if self.ema is not None:
            average = dict(zip(self.ema._names, self.ema._average, strict=True))
            self.validated.append(
                all(torch.equal(p, average[name]) for name, p in self.named_parameters())
            )

    def on_train_start(self):
        self.momenta = [
            buffer["momentum_buffer"].clone() for buffer in self.optimizers().state.values()
        ]

    def on_train_epoch_end(self):
        self.after.append(self.flat())
        self.ended = [
            buffer["momentum_buffer"].clone() for buffer in self.optimizers().state.values()
        ]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)


class Saved:
    """Records the trained weights after a checkpoint is written."""

    def __init__(self):
        self.weights, self.files = [], []

    @hookimpl
    def on_checkpoint_saved(self, run, path):
        self.weights.append(run.module.flat())
        state = torch.load(path, weights_only=True)
        trained = state.get("trained", state["model"])
        self.files.append(
            (
                torch.cat([trained[name].flatten() for name, _ in run.module.named_parameters()]),
                state["copy"],
            )
        )


def asynchronous(name, ema, path=None):
    module, saved = Copies(ema), Saved()
    trainer = one_trainer(
        devices=2,
        strategy=BaguaStrategy(algorithm="async", sync_interval_ms=1),
        max_epochs=3 if path is None else 4,
        output=name,
        plugins=[saved] if ema is None else [ema, saved],
    )
    # Without a validation, the ranks' weights differ before a checkpoint.
    trainer.fit(
        module,
        DataLoader(samples(32), batch_size=2),
        None if ema is None else DataLoader(samples(7), batch_size=2),
        ckpt_path=path,
    )
    found[name] = {
        "momenta": (module.momenta, module.ended),
        "copies": module.copies,
        "validated": module.validated,
        "after": module.after,
        "saved": saved.weights,
        "files": saved.files,
        "end": module.flat(),
        "ema": None
        if ema is None
        else torch.cat(
            [ema.state_dict()["average"][key].flatten() for key, _ in module.named_parameters()]
        ),
    }


def fit_and_resume():
    for name, (options, more) in CASES.items():
        go(name, options, name, **more)
        # Inside the second epoch.
        go(f"{name} resumed", options, f"{name} resumed", f"{name}/steps/step=8.ckpt", **more)
    asynchronous("async", None)
    asynchronous("async resumed", None, "async/last.ckpt")
    asynchronous("async with ema", EMA(0.5))
    return found
