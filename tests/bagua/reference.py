"""ByteGrad and PowerSGD by hand: what the algorithms are held to."""

import zlib

import torch
import torch.distributed as dist

from geartrain_bagua.minmax_uint8 import decode_plain, encode_plain


def quantised(chunks: torch.Tensor) -> torch.Tensor:
    """What the other end of the wire sees of ``chunks``, ``[n, d]``."""
    return decode_plain(*encode_plain(chunks))


def bytegrad(buckets: list[torch.Tensor]) -> torch.Tensor:
    """What every rank has after ByteGrad of these buckets, one a rank, of a length that divides by their number."""
    n = len(buckets)
    received = torch.stack([quantised(bucket.view(n, -1)) for bucket in buckets])  # [from, to, d]
    return quantised(received.sum(0) / n).flatten()


def bytegrad_between_ranks(bucket: torch.Tensor) -> None:
    """ByteGrad of ``bucket``, 1-d, in place, in the default process group."""
    n = dist.get_world_size()
    chunks = bucket.view(n, -1)
    received = _decoded(_exchanged(*encode_plain(chunks)))
    codes, bounds = encode_plain(received.sum(0, keepdim=True) / n)
    mine = _packed(codes, bounds)
    gathered = [torch.empty_like(mine) for _ in range(n)]
    dist.all_gather(gathered, mine)
    chunks.copy_(_decoded(torch.cat(gathered)))


def _packed(codes: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    return torch.cat([bounds.view(torch.uint8), codes], 1)


def _exchanged(codes: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    sent = _packed(codes, bounds)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return received


def _decoded(wire: torch.Tensor) -> torch.Tensor:
    return decode_plain(wire[:, 8:], wire[:, :8].clone().view(torch.float32))


class PowerSGD:
    """Algorithm 1 and 2 of Vogels et al. 2019 with a warm start, for all ranks at once: by parameter name, one gradient a rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.errors: dict[str, list[torch.Tensor]] = {}
        self.q: dict[str, torch.Tensor] = {}

    def __call__(self, gradients: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        """What every rank has in the place of its gradients."""
        return {name: self._approximated(name, of_ranks) for name, of_ranks in gradients.items()}

    def _approximated(self, name: str, gradients: list[torch.Tensor]) -> torch.Tensor:
        ranks, shape = len(gradients), gradients[0].shape
        if gradients[0].dim() < 2 or 2 * self.rank * (shape[0] + shape[1:].numel()) >= shape.numel():
            return sum(gradients) / ranks
        matrices = [gradient.flatten(1) for gradient in gradients]
        if name not in self.q:
            noise = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            self.q[name] = torch.randn(shape[1:].numel(), self.rank, dtype=gradients[0].dtype, generator=noise)
            self.errors[name] = [torch.zeros_like(matrix) for matrix in matrices]
        matrices = [matrix + error for matrix, error in zip(matrices, self.errors[name], strict=True)]
        p = torch.linalg.qr(sum(matrix @ self.q[name] for matrix in matrices) / ranks).Q
        self.q[name] = sum(matrix.t() @ p for matrix in matrices) / ranks
        approximation = p @ self.q[name].t()
        self.errors[name] = [matrix - approximation for matrix in matrices]
        return approximation.view(shape)
