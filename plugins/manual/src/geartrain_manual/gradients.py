"""Which gradients a backward has changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def gradients_now(
    parameters: Sequence[torch.nn.Parameter],
) -> list[tuple[torch.Tensor | None, int]]:
    """Each gradient, itself and not its address, which another could have later, and torch's count of its in-place changes."""
    return [(p.grad, -1 if p.grad is None else p.grad._version) for p in parameters]


def changed_since(
    parameters: Sequence[torch.nn.Parameter], before: Sequence[tuple[torch.Tensor | None, int]]
) -> list[bool]:
    """Which gradients a backward has made or added to since :func:`gradients_now`."""
    now = gradients_now(parameters)
    return [
        grad is not was or version != old
        for (grad, version), (was, old) in zip(now, before, strict=True)
    ]
