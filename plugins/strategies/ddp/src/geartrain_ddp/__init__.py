"""The strategy ``ddp`` for geartrain."""

from __future__ import annotations

from geartrain_ddp._version import __version__
from geartrain_ddp.strategy import DDPStrategy

__all__ = ["DDPStrategy", "__version__"]
