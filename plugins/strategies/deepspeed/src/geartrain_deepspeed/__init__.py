"""The strategy ``deepspeed`` for geartrain."""

from __future__ import annotations

from geartrain_deepspeed._version import __version__
from geartrain_deepspeed.strategy import DeepSpeedStrategy

__all__ = ["DeepSpeedStrategy", "__version__"]
