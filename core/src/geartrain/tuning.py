"""``from geartrain.tuning import Tuner``: of the distribution geartrain-tuner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from geartrain.planning.lazy_exports import forward

if TYPE_CHECKING:
    from geartrain_tuner import *  # noqa: F403 (for type checkers and editors)


def __getattr__(name: str) -> Any:
    return forward(__name__, "geartrain_tuner", name)
