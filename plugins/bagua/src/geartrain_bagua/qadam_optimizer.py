"""Adam with a warm-up, after which its variance stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from geartrain import UsageError


class QAdamOptimizer(Optimizer):
    """Adam, whose momentum and variance follow the gradients in its first ``warmup_steps - 1`` steps; step number ``warmup_steps``
    changes neither, and later ones the momentum alone. With the algorithm ``qadam`` the gradients of those are the momentum itself, which
    ranks have averaged in 8 bits.

    Weight decay is added to gradients before they are mixed into the momentum, as Adam does, in the warm-up and after it; Bagua drops it
    after.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        warmup_steps: above 0. Long enough that each parameter has had gradients: one whose variance is still 0 then takes steps of
            ``lr * momentum / eps``.
        betas: of the momentum and the variance.
        eps: added to the root of the variance.
        weight_decay: times the weights, added to the gradients.

    Raises:
        UsageError: a ``warmup_steps`` that is no whole number above 0; of the others, what Adam refuses.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        warmup_steps: int = 100,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps <= 0:
            raise UsageError(
                f"QAdamOptimizer: warmup_steps={warmup_steps!r} must be a whole number above 0."
            )
        checks = (  # Adam's, in its words
            ("learning rate", lr, lr >= 0.0),
            ("epsilon value", eps, eps >= 0.0),
            ("beta parameter at index 0", betas[0], 0.0 <= betas[0] < 1.0),
            ("beta parameter at index 1", betas[1], 0.0 <= betas[1] < 1.0),
            ("weight_decay value", weight_decay, weight_decay >= 0.0),
        )
        for what, value, right in checks:
            if not right:
                raise UsageError(
                    f"QAdamOptimizer: Invalid {what}: {value}. Fix: a number of 0 or more{', below 1' * what.startswith('beta')}"
                )
        self.warmup_steps = warmup_steps
        #: Whether somebody else mixes gradients into the momentum, and hands that over in their place.
        self.momentum_is_mixed = False
        super().__init__(
            params,
            {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "step": 0},
        )

    @property
    def steps(self) -> int:
        """Steps done; in each group of ``param_groups`` and of ``state_dict()`` as ``step``."""
        return int(self.param_groups[0]["step"])

    @property
    def is_warm(self) -> bool:
        """Whether the step that comes is after the warm-up."""
        return self.steps + 1 > self.warmup_steps

    def mix(self, parameter: torch.Tensor, group: dict[str, Any], gradient: torch.Tensor) -> None:
        """Replace a gradient by the momentum into which it is mixed; the optimizer's own stays as it is."""
        first = group["betas"][0]
        if group["weight_decay"]:
            gradient.add_(parameter, alpha=group["weight_decay"])
        gradient.copy_(torch.lerp(self._state_of(parameter)["exp_avg"], gradient, 1 - first))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        number = self.steps + 1
        for group in self.param_groups:
            group["step"] = number
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group, number)
        return loss

    def _step(self, parameter: torch.Tensor, group: dict[str, Any], number: int) -> None:
        state, gradient, (first, second) = self._state_of(parameter), parameter.grad, group["betas"]
        assert gradient is not None
        momentum, variance = state["exp_avg"], state["exp_avg_sq"]
        if number < self.warmup_steps:
            if group["weight_decay"]:
                gradient = gradient.add(parameter, alpha=group["weight_decay"])
            momentum.lerp_(gradient, 1 - first)
            variance.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        elif number > self.warmup_steps:
            if not self.momentum_is_mixed:
                gradient = gradient.clone()
                self.mix(parameter, group, gradient)
            momentum.copy_(gradient)
        spread = (variance.sqrt() / (1 - second**number) ** 0.5).add_(group["eps"])
        parameter.addcdiv_(momentum, spread, value=-group["lr"] / (1 - first**number))

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = (
                torch.zeros_like(parameter),
                torch.zeros_like(parameter),
            )
        return state
