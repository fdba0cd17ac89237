"""The gradients that one rank brings to a collective, and their means over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

#: The indices of parameters of one type, and their values one after the other.
Flat = tuple[list[int], torch.Tensor]


class Gradients:
    """The gradients of one rank.

    Args:
        grads: ``None`` for those that the rank has not.
        parameters: of all gradients.
    """

    def __init__(
        self, grads: Sequence[torch.Tensor | None], parameters: Sequence[torch.Tensor]
    ) -> None:
        self._grads, self._parameters = grads, parameters
        #: Of each parameter, whether the rank has a gradient: 0 or 1.
        self.present = bytes(grad is not None for grad in grads)
        self._flats: list[Flat] | None = self._joined(self.present)
        #: A sum of all bits, in 8 bytes.
        self.digest = _digest(flat for _, flat in self._flats or ())

    def flats(self, present: bytes) -> list[Flat]:
        """Return the gradients by type, which may be changed.

        Args:
            present: of all ranks; gradients that this rank has not are 0.
        """
        flats, self._flats = self._flats, None
        return flats if flats is not None and present == self.present else self._joined(present)

    def _joined(self, present: bytes) -> list[Flat]:
        by_type: dict[torch.dtype, list[int]] = {}
        for index, parameter in enumerate(self._parameters):
            if present[index]:
                by_type.setdefault(parameter.dtype, []).append(index)
        return [
            (indices, torch.cat([self._flat(index) for index in indices]))
            for indices in by_type.values()
        ]

    def _flat(self, index: int) -> torch.Tensor:
        grad, parameter = self._grads[index], self._parameters[index]
        return parameter.detach().new_zeros(parameter.numel()) if grad is None else grad.reshape(-1)


def _digest(flats: Iterator[torch.Tensor]) -> bytes:
    total = 0
    for flat in flats:
        content = flat.detach().view(torch.uint8)
        whole = content.numel() // 8 * 8
        total += int(content[:whole].view(torch.int64).sum()) + sum(content[whole:].tolist())
    return (total % 2**64).to_bytes(8, "little")


def spread(
    sums: Sequence[Flat], parameters: Sequence[torch.Tensor]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the index of each parameter that has a sum, and the sum, a view."""
    for indices, flat in sums:
        sizes = [parameters[index].numel() for index in indices]
        for index, part in zip(indices, torch.split(flat, sizes), strict=True):
            yield index, part.view_as(parameters[index])
