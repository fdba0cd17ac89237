"""``from geartrain.parallel import launch``: names of the distribution geartrain-parallel."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from geartrain.planning.lazy_exports import forward

if TYPE_CHECKING:
    from geartrain_parallel import *  # noqa: F403 (for type checkers and editors)

__getattr__ = partial(forward, __name__, "geartrain_parallel")
