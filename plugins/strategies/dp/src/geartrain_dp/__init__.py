"""The strategies ``dp`` and ``ddp2`` for geartrain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from geartrain_dp._version import __version__
from geartrain_dp.strategy import DataParallelStrategy

if TYPE_CHECKING:
    from geartrain_dp.ddp2 import DDP2Strategy

__all__ = ["DDP2Strategy", "DataParallelStrategy", "__version__"]


def __getattr__(name: str) -> Any:
    if name != "DDP2Strategy":
        raise AttributeError(f"module 'geartrain_dp' has no attribute {name!r}")
    from geartrain_dp.ddp2 import DDP2Strategy  # imports geartrain_ddp, which dp does not need

    return DDP2Strategy
