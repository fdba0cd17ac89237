"""The strategies ``ddp_spawn`` and ``spawn`` for geartrain."""

from __future__ import annotations

from geartrain_spawn._version import __version__
from geartrain_spawn.strategy import DDPSpawnStrategy

__all__ = ["DDPSpawnStrategy", "__version__"]
