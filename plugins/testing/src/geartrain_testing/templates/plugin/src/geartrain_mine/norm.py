"""Logs the norm of the gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from geartrain import Run, UsageError, hookimpl


class MinePlugin:
    """Logs the norm of the gradients as ``grad_norm``.

    Args:
        every: optimizer steps from one value to the next.

    Raises:
        UsageError: fewer than one step.
    """

    def __init__(self, every: int = 1) -> None:
        if every < 1:
            raise UsageError(f"every={every!r} must be 1 or more.")
        self.every = every

    # A wrapper: the strategy owns this hook and still works inside it. A plain @hookimpl would switch that off, and is
    # refused.
    @hookimpl(wrapper=True)
    def reduce_gradients(self, run: Run) -> Iterator[None]:
        yield  # the strategy makes the gradients the mean over ranks here
        if run.step % self.every:
            return
        gradients = [parameter.grad for parameter in run.module.parameters() if parameter.grad is not None]
        # A tensor is logged as it is: the GPU is not waited for until metrics are flushed.
        run.log("grad_norm", torch.nn.utils.get_total_norm(gradients))
