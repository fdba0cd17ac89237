"""The strategy ``bagua`` for geartrain: Bagua's algorithms on torch.distributed."""

from __future__ import annotations

from geartrain_bagua._version import __version__
from geartrain_bagua.algorithm import Algorithm, Context, Peers
from geartrain_bagua.buckets import Bucket
from geartrain_bagua.qadam_optimizer import QAdamOptimizer
from geartrain_bagua.strategy import BaguaStrategy

__all__ = [
    "Algorithm",
    "BaguaStrategy",
    "Bucket",
    "Context",
    "Peers",
    "QAdamOptimizer",
    "__version__",
]
