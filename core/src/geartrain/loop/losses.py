"""The loss in the result of ``training_step``; geartrain-callbacks handles losses with weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from geartrain.errors import TrainingError
from geartrain.errors.distributions import import_from

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
        if run.loop.weights is False and "weight" in output:
            raise _mixed(run, "a", "no")
        return output["loss"]  # type: ignore[no-any-return]
    if output is not None:
        kind = type(output).__name__
        message = f"a dict with {sorted(map(str, output))}" if isinstance(output, Mapping) else kind
        hint = "return the loss, a dict with it under 'loss', or None to skip the batch"
        raise TrainingError(f"training_step returned {message}. Fix: {hint}")
    if run.world.size > 1:
        message = f"training_step returned None on rank {run.world.rank}"
        raise TrainingError(f"{message}: the other ranks would wait for its gradients.")
    return None


def weigh(run: Run, output: Any, loss: torch.Tensor | None, first: bool) -> torch.Tensor | None:
    """Return a loss in the unit of weights, and add its weight to those of the step.

    The first loss of the fit decides whether losses have weights.

    Args:
        output: of ``training_step``.
        loss: 0-d, of ``loss_in``; ``None`` if the batch is skipped.
        first: True for the first batch of the step.

    Raises:
        TrainingError: a weight is wrong, only some losses of the fit have weights, or the strategy
            does not support them.
    """
    loop, weighted = run.loop, isinstance(output, Mapping) and "weight" in output
    if loop.weights is None and loss is not None:
        if weighted:
            weights = import_from("geartrain_callbacks.weighted_loss", "'weight' of training_step")
            loop.weights = weights.Weights(run, output["weight"])
        else:
            if run.hooks.strategy_can("weighted_loss"):  # ranks agree that losses have none
                run.coordinator.total_weight(run, None)
            loop.weights = False
    elif loss is not None and not weighted:
        raise _mixed(run, "no", "a")
    return loop.weights.weigh(output, loss, first) if loop.weights else loss


def _mixed(run: Run, has: str, had: str) -> TrainingError:
    return TrainingError(
        f"training_step returned a loss with {has} weight on rank {run.world.rank}, and earlier "
        f"losses had {had} weight. Fix: return 'weight' with every loss, or with none"
    )
