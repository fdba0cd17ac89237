"""``from geartrain.tuning import Tuner``: names of the distribution geartrain-tools."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from geartrain.planning.lazy_exports import forward

if TYPE_CHECKING:
    from geartrain_tools.tuner import *  # noqa: F403 (for type checkers and editors)

__getattr__ = partial(forward, __name__, "geartrain_tools.tuner")
