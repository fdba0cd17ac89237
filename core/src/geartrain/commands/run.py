"""``geartrain fit|validate|test|predict TARGET``."""

from __future__ import annotations

from typing import Any

import torch

from geartrain.commands.arguments import read
from geartrain.commands.target import Target
from geartrain.errors import UsageError
from geartrain.step import check_module
from geartrain.trainer import Trainer


def command(name: str, argv: list[str], target: Target | None = None) -> Trainer:
    """Make trainer, module and data from the options, and run one of the trainer's methods; ``predict`` writes predictions.pt."""
    request = read(name, argv, target)
    check_module(request.target[0], name)
    trainer = request.trainer
    if name == "predict" and trainer.output is None and not trainer.plan.options.fast_dev_run:
        raise UsageError("predict writes predictions.pt into a folder. Fix: --output DIR")
    model, data = request.make_model()
    values = request.values
    fit = name == "fit"
    files: Any = {"checkpoint": values.checkpoint, "ckpt_path": values.resume} if fit else {"ckpt_path": values.checkpoint}
    result = getattr(trainer, name)(model, datamodule=data, **files)
    if name == "predict" and trainer.output is not None and trainer.is_global_zero:
        # One output a batch, on the CPU: torch.load(path, weights_only=True) reads tensors, numbers, strings and their nestings.
        torch.save(result, trainer.output / "predictions.pt")
    return trainer
