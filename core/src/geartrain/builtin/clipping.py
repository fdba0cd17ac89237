"""``gradient_clip_val``: owns ``clip_gradients`` if it is set."""

from __future__ import annotations

import torch

from geartrain.hookspecs import hookimpl
from geartrain.loop.optimizers import parameters_of
from geartrain.loop.run import Run


class GradientClipping:
    """Clips by total norm or by value, over the parameters of all optimizers."""

    @hookimpl
    def clip_gradients(self, run: Run) -> torch.Tensor | None:
        limit = run.plan.options.gradient_clip_val
        assert limit is not None
        parameters = parameters_of(run.optimizers)
        if run.plan.options.gradient_clip_algorithm == "value":
            torch.nn.utils.clip_grad_value_(parameters, limit)
            return None
        return torch.nn.utils.clip_grad_norm_(parameters, limit)
