"""Log the norm of the gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from geartrain import Run, UsageError, hookimpl


class MinePlugin:
    """Logs the norm of the gradients as ``grad_norm``.

    Args:
        every: number of optimizer steps between two values.

    Raises:
        UsageError: ``every`` is below 1.
    """

    def __init__(self, every: int = 1) -> None:
        if every < 1:
            raise UsageError(f"every={every!r} must be 1 or more.")
        self.every = every

    # A wrapper runs around the strategy's implementation. A plain @hookimpl would replace it, and
    # is refused.
    @hookimpl(wrapper=True)
    def reduce_gradients(self, run: Run) -> Iterator[None]:
        yield  # the strategy makes the gradients the mean over ranks here
        if run.step % self.every:
            return
        gradients = [p.grad for p in run.module.parameters() if p.grad is not None]
        # Log a tensor, not a number, so that the CPU does not wait for the GPU in each step.
        run.log("grad_norm", torch.nn.utils.get_total_norm(gradients))
