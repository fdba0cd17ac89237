"""The plugin ``tensorboard`` for geartrain."""

from __future__ import annotations

from geartrain_tensorboard._version import __version__
from geartrain_tensorboard.plugin import TensorBoard

__all__ = ["TensorBoard", "__version__"]
