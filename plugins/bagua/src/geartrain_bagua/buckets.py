"""Buckets: parameters whose gradients or weights travel together, flat.

Filled greedily in reverse order of the module's parameters, which is about the order in which backward makes gradients; a bucket closes
when it holds 10 MiB, as Bagua's do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
from torch import nn

from geartrain import TrainingError

#: Bytes at which a bucket is closed: Bagua's default.
BUCKET_BYTES = 10 * 2**20


class Bucket:
    """Some parameters of one type on one device.

    Args:
        index: among the buckets, in the order in which they are reduced.
        parameters: in the order in which they lie in ``flat``.
        multiple: ``flat`` is padded with zeros so that its length divides by this.
    """

    def __init__(self, index: int, parameters: Sequence[nn.Parameter], multiple: int = 1) -> None:
        self.index = index
        self.parameters = tuple(parameters)
        #: Elements without padding.
        self.numel = sum(parameter.numel() for parameter in parameters)
        first = parameters[0]
        #: What travels: 1-d, padded with zeros.
        self.flat = torch.zeros(
            -(-self.numel // multiple) * multiple, dtype=first.dtype, device=first.device
        )
        lengths = [parameter.numel() for parameter in parameters]
        parts = torch.split(self.flat[: self.numel], lengths)
        #: Views of ``flat`` in the shape of each parameter.
        self.views = [
            part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)
        ]

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Copy gradients into ``flat``; zeros where there is none.

        Raises:
            TrainingError: one is sparse.
        """
        views, grads = self._with_gradients()
        if any(grad.layout is not torch.strided for grad in grads):
            raise TrainingError(
                "sparse gradients cannot be reduced in buckets. Fix: sparse=False in nn.Embedding"
            )
        if len(grads) < len(self.views) or self.numel < len(self.flat):
            self.flat.zero_()
        if grads:
            torch._foreach_copy_(
                views, grads
            )  # one call: a bucket may have hundreds of small gradients

    @torch.no_grad()
    def give_gradients(self) -> None:
        """Copy ``flat`` into the gradients of those parameters that have one."""
        views, grads = self._with_gradients()
        if grads:
            torch._foreach_copy_(grads, views)

    def _with_gradients(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Views and gradients of the parameters that have one."""
        grads = [parameter.grad for parameter in self.parameters]
        if None not in grads:
            return self.views, grads  # type: ignore[return-value]
        return [view for view, grad in zip(self.views, grads, strict=True) if grad is not None], [
            g for g in grads if g is not None
        ]

    @torch.no_grad()
    def take_weights(self, flat: torch.Tensor | None = None) -> torch.Tensor:
        """Copy weights into ``flat``, or into another tensor of its length; returns that."""
        flat = self.flat if flat is None else flat
        torch.cat(
            [parameter.detach().reshape(-1) for parameter in self.parameters],
            out=flat[: self.numel],
        )
        return flat

    @torch.no_grad()
    def give_weights(self, flat: torch.Tensor | None = None) -> None:
        """Copy ``flat``, or another tensor of its length, into the weights."""
        flat = self.flat if flat is None else flat
        parts = torch.split(
            flat[: self.numel], [parameter.numel() for parameter in self.parameters]
        )
        for part, parameter in zip(parts, self.parameters, strict=True):
            parameter.copy_(part.view(parameter.shape))


def make_buckets(
    parameters: Iterable[nn.Parameter], multiple: int = 1, size: int = BUCKET_BYTES
) -> list[Bucket]:
    """Buckets of the parameters that need gradients.

    Args:
        parameters: in the module's order; each once.
        size: bytes at which a bucket is closed.
    """
    trained = [parameter for parameter in dict.fromkeys(parameters) if parameter.requires_grad]
    trained.reverse()
    groups: list[list[nn.Parameter]] = []
    for _, alike in groupby(trained, key=lambda parameter: (parameter.dtype, parameter.device)):
        held = size  # a new group first
        for parameter in alike:
            if held >= size:
                groups.append([])
                held = 0
            groups[-1].append(parameter)
            held += parameter.numel() * parameter.element_size()
    return [Bucket(index, group, multiple) for index, group in enumerate(groups)]
