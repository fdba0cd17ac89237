"""Training cases of fsdp and ddp_sharded, and of ddp, from which they may not differ."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
from regression import Curve, Net, one_trainer, samples

from geartrain.callbacks import EMA

#: Each layer of the net is a unit.
UNITS = {"unit_parameters": 8}


class Scaled(Net):
    """Has a parameter of another dtype, a momentum, and parameters that are frozen for a while."""

    def __init__(self, **options):
        super().__init__(**options)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.extra.requires_grad_(False)

    def forward(self, x, extra=True):
        return super().forward(x, extra) * self.scale.float()

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.extra.requires_grad_(True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


class Changes(Net):
    """Changes weights, and saves a checkpoint, where ranks have whole copies."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.change_bias(self.extra)
        return loss

    def change_bias(self, layer):
        with torch.no_grad():
            layer.bias -= 0.01

    def on_before_backward(self, loss):
        self.change_bias(self.last)
        if self.trainer.run.batch_idx == 1:
            self.trainer.save_checkpoint("within.ckpt")

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.change_bias(self.second)


class Manual(Net):
    """Steps two optimizers in turn, and clips by itself."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()[batch_idx % 2]
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.05)
        optimizer.step()
        return loss


class Twice(Manual):
    """Computes a second loss after a step, as a GAN does."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        return super().training_step(batch, batch_idx + 1)


#: By name: the module's class and arguments, the trainer's options.
CASES = {
    "adam": (Net, {"optimizer": "adam"}, {"max_epochs": 2}),
    "other dtypes, unfrozen": (Scaled, {}, {"max_epochs": 2}),
    "accumulating": (Net, {"optimizer": "adam"}, {"accumulate_grad_batches": 3}),
    "clipped": (Net, {}, {"gradient_clip_val": 0.05}),
    "clipped by value": (
        Net,
        {},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    "tied": (Net, {"shared": True, "optimizer": "adam"}, {}),
    "batch norm": (Net, {"norm": True}, {}),
    "two optimizers": (Net, {"optimizer": "two"}, {}),
    "bf16-mixed": (Net, {}, {"precision": "bf16-mixed"}),
    "16-mixed": (Net, {}, {"precision": "16-mixed"}),
    "ema": (Net, {}, {"plugins": [EMA(0.5)], "max_epochs": 2}),
    "activation checkpointing": (
        Net,
        {"deep": 2},
        {
            "plugins": ["activation_checkpointing"],
            "plugin_options": {"activation_checkpointing": {"units": "Linear", "every": 2}},
        },
    ),
    "norms": (Net, {}, {"plugins": ["norms", "nan_guard", "model_summary"]}),
    "changes": (Changes, {}, {"max_epochs": 2}),
}

#: The same; each parameter must be in a unit.
IN_UNITS = {
    "manual": (Manual, {"optimizer": "two"}, {}),
    "manual, two losses": (Twice, {"optimizer": "two"}, {}),
}

#: Name -> the strategy and its options.
STRATEGIES = {"fsdp": ("fsdp", UNITS), "ddp_sharded": ("ddp_sharded", {})}
OTHERS = {"one unit": ("fsdp", {}), "copies": ("fsdp", {**UNITS, "shard_size": 1})}


def train(name, strategy="ddp", options=None, ranks=2, batch=6):
    """Train on batches of one rank of this size; return losses of steps, metrics and weights."""
    kind, made, of_trainer = {**CASES, **IN_UNITS}[name]
    module = kind(**made)
    curve = Curve("loss", "grad_norm") if name == "norms" else Curve()
    given = {**of_trainer, "plugins": [*of_trainer.get("plugins", []), curve]}
    trainer = one_trainer(
        strategy=strategy, strategy_options=options, devices=ranks, seed=1, **given
    )
    trainer.fit(module, DataLoader(samples(), batch), DataLoader(samples(10), 2))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return curve.values, metrics, dict(module.state_dict())
