"""``from geartrain.testing import run_plugin``: names of the distribution geartrain-testing."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from geartrain.planning.lazy_exports import forward

if TYPE_CHECKING:
    from geartrain_testing import *  # noqa: F403 (for type checkers and editors)

__getattr__ = partial(forward, __name__, "geartrain_testing")
