"""Find the gradients that a backward has changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def gradients_now(
    parameters: Sequence[torch.nn.Parameter],
) -> list[tuple[torch.Tensor | None, int]]:
    """Return each gradient and torch's count of its in-place changes.

    The gradient, not its id: another tensor may get the same id later.
    """
    return [(p.grad, -1 if p.grad is None else p.grad._version) for p in parameters]


def changed_since(
    parameters: Sequence[torch.nn.Parameter], before: Sequence[tuple[torch.Tensor | None, int]]
) -> list[bool]:
    """Return for each gradient if it was created or changed since :func:`gradients_now`."""
    current = gradients_now(parameters)
    return [
        grad is not was or version != old
        for (grad, version), (was, old) in zip(current, before, strict=True)
    ]
