"""The strategies ``fsdp`` and ``ddp_sharded`` for geartrain."""

from __future__ import annotations

from geartrain_sharded._version import __version__
from geartrain_sharded.fsdp import DDPShardedStrategy, FSDPStrategy

__all__ = ["DDPShardedStrategy", "FSDPStrategy", "__version__"]
