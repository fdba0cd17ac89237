"""Buckets: parameters whose gradients or weights are sent together, in one flat tensor.

Buckets are filled in the reverse of the module's order, which is about the order of backward. A
bucket is full when it holds 10 MiB, as in Bagua.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
from torch import nn

from geartrain import TrainingError

#: Bytes at which a bucket is full: Bagua's default.
BUCKET_BYTES = 10 * 2**20


class Bucket:
    """Some parameters of one dtype on one device.

    Args:
        index: position among the buckets, which are reduced in this order.
        parameters: the parameters, in the order in which ``flat`` holds them.
        multiple: ``flat`` is padded with zeros to a length that is a multiple of this.
    """

    def __init__(self, index: int, parameters: Sequence[nn.Parameter], multiple: int = 1) -> None:
        self.index = index
        self.parameters = tuple(parameters)
        #: Elements without padding.
        self.numel = sum(parameter.numel() for parameter in parameters)
        first = parameters[0]
        #: The gradients or weights that ranks send: 1-d, padded with zeros.
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
        """Copy gradients into ``flat``; zeros for a parameter without a gradient.

        Raises:
            TrainingError: a gradient is sparse.
        """
        grads = [parameter.grad for parameter in self.parameters]
        views = self.views
        if not all(grad is not None for grad in grads):  # `None in` asks each tensor `== None`
            pairs = list(zip(views, grads, strict=True))
            for view in (view for view, grad in pairs if grad is None):
                view.zero_()
            views = [view for view, grad in pairs if grad is not None]
        present = [grad for grad in grads if grad is not None]
        if any(grad.layout is not torch.strided for grad in present):
            raise TrainingError(
                "sparse gradients cannot be reduced in buckets. Fix: sparse=False in nn.Embedding"
            )
        self.flat[self.numel :].zero_()
        if present:  # one call: a bucket may have hundreds of small gradients
            torch._foreach_copy_(views, present)

    def give_gradients(self) -> None:
        """Let the gradients of the parameters that have one be parts of ``flat``."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is not None:
                parameter.grad = view

    @torch.no_grad()
    def take_weights(self, flat: torch.Tensor | None = None) -> torch.Tensor:
        """Copy weights into ``self.flat``, or into ``flat`` of the same length; return it."""
        flat = self.flat if flat is None else flat
        weights = [parameter.detach().reshape(-1) for parameter in self.parameters]
        torch.cat(weights, out=flat[: self.numel])
        return flat

    @torch.no_grad()
    def give_weights(self, flat: torch.Tensor | None = None) -> None:
        """Copy ``self.flat``, or ``flat`` of the same length, into the weights."""
        flat = self.flat if flat is None else flat
        lengths = [parameter.numel() for parameter in self.parameters]
        parts = torch.split(flat[: self.numel], lengths)
        for part, parameter in zip(parts, self.parameters, strict=True):
            parameter.copy_(part.view(parameter.shape))


def make_buckets(
    parameters: Iterable[nn.Parameter], multiple: int = 1, size: int = BUCKET_BYTES
) -> list[Bucket]:
    """Return buckets of the parameters that need gradients.

    Args:
        parameters: the module's parameters, in its order; duplicates are dropped.
        multiple: the length of each bucket is a multiple of this.
        size: bytes at which a bucket is full.
    """
    trained = [parameter for parameter in dict.fromkeys(parameters) if parameter.requires_grad]
    trained.reverse()
    groups: list[list[nn.Parameter]] = []
    for _, alike in groupby(trained, key=lambda parameter: (parameter.dtype, parameter.device)):
        held = size  # start with a new group
        for parameter in alike:
            if held >= size:
                groups.append([])
                held = 0
            groups[-1].append(parameter)
            held += parameter.numel() * parameter.element_size()
    return [Bucket(index, group, multiple) for index, group in enumerate(groups)]
