"""The strategy ``bagua`` for geartrain: Bagua's algorithms on torch.distributed."""

from __future__ import annotations

from geartrain_bagua._version import __version__
from geartrain_bagua.algorithm import Algorithm, Context, Peers
from geartrain_bagua.buckets import Bucket

__all__ = ["Algorithm", "Bucket", "Context", "Peers", "__version__"]
