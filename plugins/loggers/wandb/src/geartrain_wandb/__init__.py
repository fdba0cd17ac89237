"""The plugin ``wandb`` for geartrain."""

from __future__ import annotations

from geartrain_wandb._version import __version__
from geartrain_wandb.plugin import WandB

__all__ = ["WandB", "__version__"]
