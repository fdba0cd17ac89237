"""The arguments of a module's ``clip_gradients``."""

from __future__ import annotations

from typing import Any

from geartrain import TrainingError


def check_clip(limit: Any, algorithm: Any) -> None:
    """Check the arguments of ``self.clip_gradients``.

    Raises:
        TrainingError: ``limit`` is no number above 0, or ``algorithm`` is unknown.
    """
    number = isinstance(limit, int | float) and not isinstance(limit, bool)
    if algorithm not in ("norm", "value") or not number or limit <= 0:
        raise TrainingError(
            f"self.clip_gradients: {limit!r}, {algorithm!r}. "
            "Fix: give a number above 0, and 'norm' or 'value'"
        )
