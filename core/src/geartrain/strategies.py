"""``from geartrain.strategies import DDPStrategy``: strategy classes of whatever is installed, found by their entry points."""

from __future__ import annotations

from typing import Any

from geartrain.planning.lazy_exports import names, resolve

_HOMES = {
    "BaguaStrategy": "bagua",
    "DDP2Strategy": "ddp2",
    "DDPSpawnStrategy": "ddp_spawn",
    "DDPStrategy": "ddp",
    "DataParallelStrategy": "dp",
    "HorovodStrategy": "horovod",
    "QAdamOptimizer": "bagua",
}


def __getattr__(name: str) -> Any:
    return resolve("strategy", __name__, name, _HOMES)


def __dir__() -> list[str]:
    return names("strategy")
