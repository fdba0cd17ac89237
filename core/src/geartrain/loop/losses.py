"""Losses: read the result of ``training_step``, and weigh sums of losses by what they count.

``{"loss": summed_loss, "weight": count}`` gives the gradients of one batch that has the samples of
all micro-batches and ranks: the sum of all losses, divided by the sum of all weights. A mean of
means differs from it if counts are unequal:
https://github.com/huggingface/transformers/issues/34191

Gradients are linear: ``reduce_gradients`` gives the mean over ranks of gradients in an agreed unit,
and one factor then divides them by the weights of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

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
        if run.loop.weighted is False and "weight" in output:
            raise _mixed(run)
        return output["loss"]  # type: ignore[no-any-return]
    if output is not None:
        kind = type(output).__name__
        message = f"a dict with {sorted(map(str, output))}" if isinstance(output, Mapping) else kind
        hint = "return the loss, a dict with it under 'loss', or None to skip the batch"
        raise TrainingError(f"training_step returned {message}. Fix: {hint}")
    if run.world.size > 1:
        raise TrainingError(
            f"training_step returned None on rank {run.world.rank}: "
            "the other ranks would wait for its gradients."
        )
    return None


def weigh(run: Run, output: Any, loss: torch.Tensor | None) -> torch.Tensor | None:
    """Return a loss in the unit of weights, and add its weight to those of the step.

    Args:
        output: of ``training_step``.
        loss: 0-d, of ``loss_in``; ``None`` if the batch is skipped.

    Raises:
        TrainingError: a weight is not a finite number of 0 or more, only some losses of the fit
            have weights, or the strategy does not support them.
    """
    loop = run.loop
    if loss is None:
        return None
    weighted = isinstance(output, Mapping) and "weight" in output
    weight = _number(run, output["weight"]) if weighted else None
    if loop.weighted is None:
        loop.weighted, loop.weight_unit = weighted, _unit(run, weight)
    elif loop.weighted != weighted:
        raise _mixed(run)
    if weight is None:
        return loss
    loop.weight = loop.weight + weight
    return loss / loop.weight_unit


def _unit(run: Run, weight: float | torch.Tensor | None) -> float:
    """Agree with the other ranks whether losses have weights, and return the unit of weights.

    It is near the mean weight of the first batches, so that float16 does not overflow. It is a
    power of two: a run that resumes with another unit has the same bits.
    """
    if not supported(run):
        if weight is None:
            return 1.0
        raise TrainingError(
            f"{run.plan.strategy.label} does not support 'weight' in the result of training_step: "
            "it does not average the gradients of all ranks in each step. "
            "Fix: return the mean loss without 'weight', or use --strategy ddp"
        )
    mean = float(run.coordinator.total_weight(run, weight) or 0.0) / run.world.size
    return 2.0 ** math.floor(math.log2(mean)) if mean > 0 else 1.0


def divide_by_weights(run: Run, loss: torch.Tensor, size: int) -> torch.Tensor:
    """Divide the gradients and the loss of a step by the weights of all ranks.

    Args:
        loss: the mean of the losses that ``weigh`` returned.
        size: the number of batches in the step.

    Returns:
        This rank's share of the loss: its mean over ranks is the loss of all that ranks counted.
    """
    total = run.coordinator.total_weight(run, run.loop.weight)
    unit = run.loop.weight_unit * run.world.size * size  # the strategy takes the mean over ranks
    factor: Any = unit / total if isinstance(total, torch.Tensor) or total else 0.0
    if isinstance(factor, torch.Tensor):  # the CPU does not wait for it
        factor = factor.where(total > 0, 0.0)
    grads = [p.grad for p in parameters_of(run.optimizers) if p.grad is not None]
    if grads:
        torch._foreach_mul_(grads, factor)
    run.loop.weighted_loss = loss.detach() * factor
    return run.loop.weighted_loss


def supported(run: Run) -> bool:
    """True if the strategy gives every rank the mean of all ranks' gradients in each step.

    A strategy declares that it does not with ``capabilities = {"weighted_loss": False}``.
    """
    return run.world.size == 1 or run.hooks.strategy_can("weighted_loss")


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


def _mixed(run: Run) -> TrainingError:
    has, had = ("no", "a") if run.loop.weighted else ("a", "no")
    return TrainingError(
        f"training_step returned a loss with {has} weight on rank {run.world.rank}, and earlier "
        f"losses had {had} weight. Fix: return 'weight' with every loss, or with none"
    )
