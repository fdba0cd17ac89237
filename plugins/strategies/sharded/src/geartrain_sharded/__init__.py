"""The strategies ``fsdp``, ``ddp_sharded`` and ``tensor_parallel`` for geartrain."""

from __future__ import annotations

from geartrain_sharded._version import __version__
from geartrain_sharded.fsdp import DDPShardedStrategy, FSDPStrategy
from geartrain_sharded.tensor_parallel import TensorParallelStrategy

__all__ = ["DDPShardedStrategy", "FSDPStrategy", "TensorParallelStrategy", "__version__"]
