"""``from geartrain.callbacks import EarlyStopping``: the callbacks of the distribution geartrain-callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from geartrain.planning.lazy_exports import forward

if TYPE_CHECKING:
    from geartrain_callbacks import *  # noqa: F403 (for type checkers and editors)


def __getattr__(name: str) -> Any:
    return forward(__name__, "geartrain_callbacks", name)
