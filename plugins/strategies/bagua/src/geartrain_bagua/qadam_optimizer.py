"""Adam with a warm-up, after which the variance is constant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from geartrain import UsageError


class QAdamOptimizer(Optimizer):
    """Adam with a warm-up, for the algorithm ``qadam``; also usable alone.

    The first ``warmup_steps - 1`` steps update the momentum and the variance. Step number
    ``warmup_steps`` updates neither. Later steps update only the momentum. With the algorithm
    ``qadam``, the gradient in these steps is the new momentum, which ranks have averaged in 8 bits.

    Weight decay is added to gradients before they are mixed into the momentum, as in Adam, during
    the warm-up and after it. Bagua drops it after the warm-up.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        warmup_steps: a number above 0. Each parameter should get gradients in these steps: if its
            variance is still 0 afterwards, its updates are ``lr * momentum / eps``.
        betas: coefficients of the momentum and the variance.
        eps: added to the square root of the variance.
        weight_decay: factor of the weights, which are added to the gradients.

    Raises:
        UsageError: ``warmup_steps`` is no whole number above 0, or another argument has a value
            that Adam refuses.

    Source:
        Tang et al. 2021, https://arxiv.org/abs/2102.02888; Bagua's ``QAdamOptimizer``.
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
        checks = (  # with the texts of torch.optim.Adam
            ("learning rate", lr, lr >= 0.0),
            ("epsilon value", eps, eps >= 0.0),
            ("beta parameter at index 0", betas[0], 0.0 <= betas[0] < 1.0),
            ("beta parameter at index 1", betas[1], 0.0 <= betas[1] < 1.0),
            ("weight_decay value", weight_decay, weight_decay >= 0.0),
        )
        for name, value, valid in checks:
            if not valid:
                below = ", below 1" if name.startswith("beta") else ""
                raise UsageError(
                    f"QAdamOptimizer: Invalid {name}: {value}. Fix: use 0 or more{below}"
                )
        self.warmup_steps = warmup_steps
        #: True if the algorithm replaces gradients by the new momentum before ``step``.
        self.momentum_is_mixed = False
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "step": 0})

    @property
    def steps(self) -> int:
        """Number of finished steps; each group of ``param_groups`` holds it as ``step``."""
        return int(self.param_groups[0]["step"])

    @property
    def is_warm(self) -> bool:
        """True if the next step is after the warm-up."""
        return self.steps + 1 > self.warmup_steps

    def mix(self, parameter: torch.Tensor, group: dict[str, Any], gradient: torch.Tensor) -> None:
        """Replace a gradient by the new momentum; do not change the optimizer's momentum.

        Args:
            parameter: the parameter.
            group: its group in ``param_groups``.
            gradient: its gradient, of the parameter's shape; changed in place.
        """
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
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state
