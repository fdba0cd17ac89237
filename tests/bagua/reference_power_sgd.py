"""A hand-written PowerSGD, the reference for the algorithm's tests."""

import zlib

import torch


class PowerSGD:
    """Algorithms 1 and 2 of Vogels et al. 2019 with a warm start, for all ranks at once.

    A parameter's name maps to one gradient per rank.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.errors: dict[str, list[torch.Tensor]] = {}
        self.q: dict[str, torch.Tensor] = {}

    def __call__(self, gradients: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return the gradients that replace those of every rank."""
        return {name: self._approximated(name, of_ranks) for name, of_ranks in gradients.items()}

    def _approximated(self, name: str, gradients: list[torch.Tensor]) -> torch.Tensor:
        ranks, shape = len(gradients), gradients[0].shape
        thin = self.rank * (shape[0] + shape[1:].numel())
        if gradients[0].dim() < 2 or 2 * thin >= shape.numel():
            return sum(gradients) / ranks
        matrices = [gradient.flatten(1) for gradient in gradients]
        if name not in self.q:
            noise = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            self.q[name] = torch.randn(
                shape[1:].numel(), self.rank, dtype=gradients[0].dtype, generator=noise
            )
            self.errors[name] = [torch.zeros_like(matrix) for matrix in matrices]
        matrices = [
            matrix + error for matrix, error in zip(matrices, self.errors[name], strict=True)
        ]
        p = torch.linalg.qr(sum(matrix @ self.q[name] for matrix in matrices) / ranks).Q
        self.q[name] = sum(matrix.t() @ p for matrix in matrices) / ranks
        approximation = p @ self.q[name].t()
        self.errors[name] = [matrix - approximation for matrix in matrices]
        return approximation.view(shape)
