"""Losses with weights: sums of losses are divided by what they count.

``{"loss": summed_loss, "weight": count}`` gives the gradients of one batch that has the samples of
all micro-batches and ranks: the sum of all losses, divided by the sum of all weights. A mean of
means differs from it if counts are unequal:
https://github.com/huggingface/transformers/issues/34191

Gradients are linear: ``reduce_gradients`` gives the mean over ranks of gradients in an agreed unit,
and one factor then divides them by the weights of all ranks.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch

from geartrain import Run, TrainingError
from geartrain.plugin_api import parameters_of


class Weights:
    """The weights of the losses of one fit on this rank.

    Args:
        weight: of the first loss.

    Raises:
        TrainingError: the strategy does not give every rank the mean of all ranks' gradients in
            each step: it declares ``capabilities = {"weighted_loss": False}``.
    """

    def __init__(self, run: Run, weight: Any) -> None:
        number = _number(run, weight)
        if run.world.size > 1 and not run.hooks.strategy_can("weighted_loss"):
            raise TrainingError(
                f"{run.plan.strategy.label} does not support 'weight' in the result of "
                "training_step: it does not average the gradients of all ranks in each step. "
                "Fix: return the mean loss without 'weight', or use --strategy ddp"
            )
        # Ranks agree that losses have weights.
        mean = float(run.coordinator.total_weight(run, number) or 0.0) / run.world.data_size
        self._run = run
        #: The weight that counts as 1 until all ranks' weights of a step are known. It is near the
        #: mean weight of the first batches, so that float16 does not overflow. It is a power of
        #: two: a run that resumes with another unit has the same bits.
        self._unit = 2.0 ** math.floor(math.log2(mean)) if mean > 0 else 1.0
        #: Of this rank's batches in the running step.
        self._total: float | torch.Tensor = 0.0
        #: The loss of the newest step, 0-d; its mean over ranks is the mean of all that the ranks
        #: counted.
        self.loss = torch.zeros(())

    def weigh(self, output: Any, loss: torch.Tensor | None, first: bool) -> torch.Tensor | None:
        """Return a loss in the unit of weights, and add its weight to those of the step.

        Args:
            output: of ``training_step``, with the weight.
            loss: 0-d; ``None`` if the batch is skipped.
            first: True for the first batch of the step.

        Raises:
            TrainingError: the weight is not a finite number of 0 or more.
        """
        if first:
            self._total = 0.0
        if loss is None:
            return None
        self._total = self._total + _number(self._run, output["weight"])
        return loss / self._unit

    def divide(self, loss: torch.Tensor, size: int) -> torch.Tensor:
        """Divide the gradients and the loss of a step by the weights of all ranks.

        Args:
            loss: the mean of the losses that :meth:`weigh` returned.
            size: the number of batches in the step.

        Returns:
            This rank's share of the loss: its mean over ranks is the loss of all that ranks
            counted.
        """
        run, total = self._run, self._run.coordinator.total_weight(self._run, self._total)
        unit = self._unit * run.world.data_size * size  # the strategy takes the mean over ranks
        factor: Any = unit / total if isinstance(total, torch.Tensor) or total else 0.0
        if isinstance(factor, torch.Tensor):  # the CPU does not wait for it
            factor = factor.where(total > 0, 0.0)
        grads = [p.grad for p in parameters_of(run.optimizers) if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)
        self.loss = loss.detach() * factor
        return self.loss


def _number(run: Run, weight: Any) -> float | torch.Tensor:
    """Return a weight as a float, or as a 0-d tensor on its device: the CPU does not wait for it.

    Raises:
        TrainingError: it is not a number, or is known to be negative, infinite or NaN.
    """
    message = "one number"
    if isinstance(weight, torch.Tensor) and weight.numel() == 1 and weight.dtype != torch.bool:
        weight = weight.detach().reshape(())
        if weight.device.type == "cuda" and not weight.is_complex():
            weight = weight.float() if weight.dtype.itemsize < 4 else weight
            if run.world.size == 1:  # several ranks check their totals when they add them
                torch._assert_async((weight >= 0) & weight.isfinite(), _BAD)
            return weight  # type: ignore[no-any-return]
        weight = weight.item()
    if isinstance(weight, Real) and not isinstance(weight, bool):
        if 0 <= (value := float(weight)) < math.inf:
            return value
        message = "finite and not negative"
    raise TrainingError(
        f"training_step returned the weight {weight!r}, which is not {message}. {_FIX}"
    )


_BAD = "training_step returned a weight that is negative, infinite or NaN"
_FIX = "Fix: return the number of samples or tokens that the loss sums"
