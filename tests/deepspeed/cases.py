"""Training cases of deepspeed, and of ddp, from which it may not differ."""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
from regression import SAVES, Net, one_trainer, samples


class Groups(Net):
    """Has two groups with different learning rates, momentum, frozen parameters and a scheduler."""

    def __init__(self):
        super().__init__(frozen=True)

    def configure_optimizers(self):
        last = {"params": [*self.last.parameters()], "lr": 0.02, "momentum": 0.5}
        layers = (self.first, self.second, self.extra)
        rest = {"params": [p for layer in layers for p in layer.parameters()]}
        optimizer = torch.optim.SGD([rest, last], lr=0.05, momentum=0.9, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class ChangesFirst(Net):
    """Changes a weight before the first step."""

    def change(self, layer):
        with torch.no_grad():
            layer.bias -= 0.01

    def on_train_start(self):
        self.change(self.first)


class Changes(ChangesFirst):
    """Also changes one between forward and backward, and one past torch's count of changes."""

    def on_before_backward(self, loss):
        self.change(self.last)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.second.weight.data.mul_(0.9)


#: By name: the module's class and arguments, the trainer's options; each has 20 steps or so.
CASES = {
    "adam": (Net, {"optimizer": "adam"}, {"max_epochs": 5}),
    "groups": (Groups, {}, {"max_epochs": 5}),
    "accumulating": (Net, {"optimizer": "adam"}, {"max_epochs": 10, "accumulate_grad_batches": 3}),
    "clipped": (Groups, {}, {"max_epochs": 5, "gradient_clip_val": 0.05}),
    "tied": (Net, {"shared": True, "optimizer": "adam"}, {"max_epochs": 5}),
    "batch norm": (Net, {"norm": True, "optimizer": "adam"}, {"max_epochs": 5}),
    "bf16-mixed": (Net, {}, {"max_epochs": 5, "precision": "bf16-mixed"}),
}
#: A case of stages 1 and 2.
IN_WHOLES = {"changes": (Changes, {"optimizer": "adam"}, {"max_epochs": 5})}
STAGES = (1, 2, 3)


def options(stage):
    """Return the strategy's options: a file, so that stage 3 keeps no small parameter whole."""
    sizes = {"reduce_bucket_size": 1000}
    if stage == 3:
        sizes["stage3_param_persistence_threshold"] = 0
    written = Path(f"zero{stage}.{os.getpid()}")
    written.write_text(json.dumps({"zero_optimization": sizes}))
    written.replace(f"zero{stage}.json")  # whole, whichever rank reads it
    return {"stage": stage, "config": f"zero{stage}.json"}


def train(name, strategy="ddp", given=None):
    """Train on global batches of 12 samples; return metrics and weights."""
    kind, made, of_trainer = {**CASES, **IN_WHOLES}[name]
    module = kind(**made)
    trainer = one_trainer(
        strategy=strategy, strategy_options=given, devices=2, seed=1, **of_trainer
    )
    trainer.fit(module, DataLoader(samples(), 6), DataLoader(samples(10), 2))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return trainer.global_step, metrics, dict(module.state_dict())


def train_all():
    """Return steps, metrics and weights of each case, under ddp and each stage."""
    found = {"ddp": {name: train(name) for name in {**CASES, **IN_WHOLES}}}
    for stage in STAGES:
        names = CASES if stage == 3 else {**CASES, **IN_WHOLES}
        found[stage] = {name: train(name, "deepspeed", options(stage)) for name in names}
    return found


# --- checkpoints ----------------------------------------------------------------------------------

#: Who saves, and who resumes.
PAIRS = (("ddp", 1), ("ddp", 3), ("fsdp", 2), (1, "fsdp"), (2, "ddp"), (3, "ddp"), (3, 1), (2, 3))
MODULES = {
    "adam": lambda: Net(optimizer="adam", shared=True, norm=True),
    "groups": Groups,
}


def run_epochs(name, strategy, epochs, **given):
    """Train to the end of an epoch; return the weights."""
    settings = {"unit_parameters": 8} if strategy == "fsdp" else None
    if isinstance(strategy, int):
        settings, strategy = options(strategy), "deepspeed"
    module, path = MODULES[name](), given.pop("resumes", None)
    trainer = one_trainer(
        strategy=strategy, strategy_options=settings, devices=2, max_epochs=epochs, **given
    )
    trainer.fit(module, DataLoader(samples(), 6), ckpt_path=path)
    return dict(module.state_dict())


def interchange():
    """Return the weights after two epochs, at once and of which another strategy has the second."""
    found = {}
    for name in MODULES:
        found[name, "at once"] = run_epochs(name, "ddp", 2)
        for saving in dict(PAIRS):
            run_epochs(name, saving, 1, output=f"{name} {saving}")
        for saving, resuming in PAIRS:
            path = f"{name} {saving}/last.ckpt"
            found[name, saving, resuming] = run_epochs(name, resuming, 2, resumes=path)
    return found


# --- refused on the ranks -------------------------------------------------------------------------


class Whole(Net):
    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters())


class Scaled(torch.optim.SGD):
    """An optimizer of a user, which divides each gradient by its norm."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= parameter.grad.norm() + 1e-6
        return super().step(closure)


class Scales(Net):
    def configure_optimizers(self):
        return Scaled(self.parameters(), lr=0.1)


MADE = {
    "whole": Whole,
    "scaled": Scales,
    "two": lambda: Net(optimizer="two"),
    "changes": ChangesFirst,
    **SAVES,
}


def go_wrong(kind):
    module = MADE[kind]() if kind in MADE else Net(**{kind: True})
    given = options(3) if kind.startswith(("changes", "saves")) else None
    trainer = one_trainer(strategy="deepspeed", strategy_options=given, devices=2)
    trainer.fit(module, DataLoader(samples(), 6))


class Parts(Net):
    """In the second batch rank 1 calls all_gather, has another loss, or changes a weight."""

    def __init__(self, event):
        super().__init__()
        self.event, self.since = event, 0.0

    def forward(self, x, extra=True):
        hidden = torch.tanh(self.first(x))
        if self.global_rank == 1 and self.trainer.run.batch_idx == 1:
            self.since = time.time()
            if self.event == "all_gather":
                self.all_gather(torch.ones(3))
            elif self.event == "part":
                return self.last(self.second(hidden))
            elif self.event == "leaf":
                return torch.zeros(len(x), 1, requires_grad=True)
        return self.last(self.extra(self.second(hidden)))

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.event == "weight" and self.global_rank == 1 and batch_idx == 1:
            self.first.weight.mul_(1.01)


def part(stage, event):
    module = Parts(event)
    trainer = one_trainer(strategy="deepspeed", strategy_options=options(stage), devices=2)
    try:
        trainer.fit(module, DataLoader(samples(), 6))
    except Exception as error:
        return str(error), time.time() - module.since if module.since else 0.0
    return "no error", 0.0
