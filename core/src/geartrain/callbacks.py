"""``from geartrain.callbacks import EarlyStopping``: names of geartrain-callbacks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from geartrain.planning.lazy_exports import forward

if TYPE_CHECKING:
    from geartrain_callbacks import *  # noqa: F403 (for type checkers and editors)

__getattr__ = partial(forward, __name__, "geartrain_callbacks")
