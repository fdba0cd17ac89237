"""The strategy ``elastic`` for geartrain."""

from __future__ import annotations

from geartrain_elastic._version import __version__
from geartrain_elastic.strategy import ElasticStrategy

__all__ = ["ElasticStrategy", "__version__"]
