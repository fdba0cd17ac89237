"""``from geartrain.strategies import DDPStrategy``: the classes of installed strategies."""

from __future__ import annotations

from functools import partial

from geartrain.planning.lazy_exports import names, resolve

_HOMES = {
    "BaguaStrategy": "bagua",
    "DDP2Strategy": "ddp2",
    "DDPShardedStrategy": "ddp_sharded",
    "DDPSpawnStrategy": "ddp_spawn",
    "DDPStrategy": "ddp",
    "DataParallelStrategy": "dp",
    "DeepSpeedStrategy": "deepspeed",
    "FSDPStrategy": "fsdp",
    "HorovodStrategy": "horovod",
    "QAdamOptimizer": "bagua",
    "TensorParallelStrategy": "tensor_parallel",
}

__getattr__ = partial(resolve, "strategy", __name__, homes=_HOMES)
__dir__ = partial(names, "strategy")
