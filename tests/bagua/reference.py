"""ByteGrad by hand, on the plain lines of the codec: what the algorithm is held to."""

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
