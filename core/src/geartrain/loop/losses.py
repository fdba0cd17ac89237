"""Losses: read the result of ``training_step``, and weigh sums of losses by what they count.

``{"loss": summed_loss, "weight": count}`` gives the gradients of one batch that has the samples of
all micro-batches and ranks: the sum of all losses, divided by the sum of all weights. A mean of
means differs from it if counts are unequal:
https://github.com/huggingface/transformers/issues/34191
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

from geartrain.checkpoint.training_state import strategy_can
from geartrain.errors import TrainingError
from geartrain.loop.optimizers import parameters_of

if TYPE_CHECKING:
    from geartrain.loop.run import Run


def loss_in(run: Run, output: Any) -> torch.Tensor | None:
    """Return the loss in the dict of ``training_step``; ``None`` for ``None``, to skip the batch.

    Raises:
        TrainingError: it is something else, or one of several ranks skips its batch, or only some
            losses of the fit have a weight.
    """
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping) and isinstance(output.get("loss"), torch.Tensor):
        if run.weighted is False and "weight" in output:
            raise _mixed(run)
        return output["loss"]  # type: ignore[no-any-return]
    if output is not None:
        kind = type(output).__name__
        what = f"a dict with {sorted(map(str, output))}" if isinstance(output, Mapping) else kind
        fix = "return the loss, a dict with it under 'loss', or None to skip the batch"
        raise TrainingError(f"training_step returned {what}. Fix: {fix}")
    if run.world.size > 1:
        raise TrainingError(
            f"training_step returned None on rank {run.world.rank}: "
            "the other ranks would wait for its gradients."
        )
    return None


class LossWindow:
    """The losses of one optimizer step, if they have weights or are the first of a fit.

    The total weight is known after the window's last forward. DDP reduces gradients during the last
    backward. Between the two, ``scale`` divides the gradients so far and the last loss by the total
    weight. Until then the first batch's weight is the unit, so that float16 does not overflow.

    Args:
        run: the run. ``run.weighted`` is ``None`` until the first loss of the fit is known.
        size: the number of batches in the window.
    """

    def __init__(self, run: Run, size: int) -> None:
        self._run, self._size, self._is_first = run, size, run.weighted is None
        #: This rank's share of the mean loss, detached; ``None`` if every batch was skipped.
        self.loss: torch.Tensor | None = None
        self._weight: float | torch.Tensor = 0.0
        #: The factor of the gradients so far; ``None`` before the first loss with a weight.
        self._factor: float | torch.Tensor | None = None

    def scale(self, output: Any, loss: torch.Tensor | None, last: bool) -> torch.Tensor | None:
        """Return the loss for backward.

        Args:
            output: of ``training_step``.
            loss: 0-d, of ``loss_in``; ``None`` if the batch is skipped.
            last: True for the last batch of the window.

        Raises:
            TrainingError: a weight is not a finite number of 0 or more, only some losses of the fit
                have weights, or the strategy does not support them.
        """
        run = self._run
        if loss is not None:
            weighted = isinstance(output, Mapping) and "weight" in output
            if run.weighted is None:
                if weighted and not supported(run):
                    raise TrainingError(
                        f"{run.plan.strategy.label} does not support 'weight' in the result of "
                        "training_step: it does not average the gradients of all ranks in each "
                        "step. Fix: return the mean loss without 'weight', or use --strategy ddp"
                    )
                run.weighted = weighted
            elif run.weighted != weighted:
                raise _mixed(run)
            if weighted:
                weight = _number(run, output["weight"])
                self._weight = self._weight + weight
                if self._factor is None:
                    self._factor = _divide(1 / self._size, weight, 1 / self._size)
        if last:
            self._normalise()
        if loss is not None:
            loss = loss / self._size if self._factor is None else loss * self._factor
            here = loss.detach()
            self.loss = here if self.loss is None else self.loss + here
        if last and run.weighted:
            run.weighted_loss = self.loss
        return loss

    def _normalise(self) -> None:
        """Agree with the other ranks on the total weight, and scale the gradients so far by it."""
        run = self._run
        if self._factor is None:
            if self._is_first and run.weighted is False and supported(run):
                run.ranks.total_weight(run, None)
            return
        total = run.ranks.total_weight(run, self._weight)
        # The strategy takes the mean over ranks, so this rank's share is multiplied by their number
        before, self._factor = self._factor, _divide(float(run.world.size), total, 0.0)
        if self.loss is None:
            return
        ratio = self._factor / before
        self.loss = self.loss * ratio
        grads = [p.grad for p in parameters_of(run.optimizers) if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, ratio)


def supported(run: Run) -> bool:
    """True if the strategy gives every rank the mean of all ranks' gradients in each step.

    A strategy declares that it does not with ``capabilities = {"weighted_loss": False}``.
    """
    return run.world.size == 1 or strategy_can(run.hooks.parts, "weighted_loss")


def _number(run: Run, weight: Any) -> float | torch.Tensor:
    """Return a weight as a float, or as a 0-d tensor on its device: the CPU does not wait for it.

    Raises:
        TrainingError: it is not a number, or is known to be negative, infinite or NaN.
    """
    what = "one number"
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
        what = "finite and not negative"
    raise TrainingError(
        f"training_step returned the weight {weight!r}, which is not {what}. {_FIX}"
    )


_BAD = "training_step returned a weight that is negative, infinite or NaN"
_FIX = "Fix: return the number of samples or tokens that the loss sums"


def _divide(a: float, b: float | torch.Tensor, if_zero: float) -> float | torch.Tensor:
    if isinstance(b, torch.Tensor):
        return torch.where(b > 0, a / b, if_zero)
    return a / b if b else if_zero


def _mixed(run: Run) -> TrainingError:
    has, had = ("no", "a") if run.weighted else ("a", "no")
    return TrainingError(
        f"training_step returned a loss with {has} weight on rank {run.world.rank}, and earlier "
        f"losses had {had} weight. Fix: return 'weight' with every loss, or with none"
    )
