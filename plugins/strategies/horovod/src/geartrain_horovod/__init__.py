"""The strategy ``horovod`` for geartrain."""

from __future__ import annotations

from geartrain_horovod._version import __version__
from geartrain_horovod.strategy import HorovodStrategy

__all__ = ["HorovodStrategy", "__version__"]
