"""``geartrain fit|validate|test|predict TARGET``."""

from __future__ import annotations

from typing import Any

from geartrain.commands.arguments import read
from geartrain.commands.target import Target
from geartrain.trainer import Trainer


def command(name: str, argv: list[str], target: Target | None = None) -> Trainer:
    """Make trainer, module and data from the options, and run one of the trainer's methods."""
    request = read(name, argv, target)
    model, data = request.make_model()
    checkpoint: Any = {"checkpoint" if name == "fit" else "ckpt_path": request.values.checkpoint}
    getattr(request.trainer, name)(model, datamodule=data, **checkpoint)
    return request.trainer
