"""``Trainer(gradient_clip_val=...)``, and a module's ``clip_gradients``: check, and clip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from geartrain import Run, TrainingError, hookimpl
from geartrain.plugin_api import parameters_of


class GradientClipping:
    """Clips the parameters of all optimizers together, if ``gradient_clip_val`` is set."""

    @hookimpl
    def clip_gradients(self, run: Run) -> torch.Tensor | None:
        limit = run.plan.options.gradient_clip_val
        assert limit is not None
        return clip(run.optimizers, limit, run.plan.options.gradient_clip_algorithm)


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


def clip(optimizers: Sequence[Optimizer], limit: float, algorithm: str) -> torch.Tensor | None:
    """Clip the gradients that these optimizers step; return the norm before, for ``"norm"``."""
    parameters = parameters_of(optimizers)
    if algorithm == "value":
        torch.nn.utils.clip_grad_value_(parameters, limit)
        return None
    return torch.nn.utils.clip_grad_norm_(parameters, limit)
