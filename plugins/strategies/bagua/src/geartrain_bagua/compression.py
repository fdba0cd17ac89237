"""Average tensors in MinMaxUInt8: one byte per element and 8 bytes per chunk."""

from __future__ import annotations

import torch
import torch.distributed as dist

from geartrain_bagua.algorithm import Peers
from geartrain_bagua.minmax_uint8 import compress, decompress


def eight_bit_mean(flat: torch.Tensor, among: Peers, average: bool = True) -> None:
    """Replace ``flat`` by the mean (or sum) over ``among``, in place.

    Chunk j is sent to rank j, which averages it in float32 and sends the result to all ranks. Both
    messages use 8 bits. The result is the same on every rank, bit by bit. Call it in the
    communication thread.

    Args:
        flat: floats, 1-d; the length is a multiple of the number of ranks.
        among: the ranks.
        average: use the mean over ranks; if False, the sum.
    """
    sent = compress(flat.view(among.size, -1))
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=among.group)
    parts = decompress(got)
    compressed = compress((parts.mean(0) if average else parts.sum(0))[None])
    dist.all_gather(list(got), compressed[0], group=among.group)  # reuses the rows of ``got``
    # Decode this rank's own chunk too: otherwise ranks would differ.
    if flat.dtype is torch.float32:
        decompress(got, flat.view(among.size, -1))
    else:
        flat.view(among.size, -1).copy_(decompress(got))
