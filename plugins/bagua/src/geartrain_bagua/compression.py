"""The mean of tensors that travel as MinMaxUInt8: a byte an element, and 8 a chunk."""

from __future__ import annotations

import torch
import torch.distributed as dist

from geartrain_bagua.algorithm import Peers
from geartrain_bagua.minmax_uint8 import compress, decompress


def eight_bit_mean(flat: torch.Tensor, among: Peers, average: bool = True) -> None:
    """Replace ``flat`` by the mean (or sum) over ``among``, in place: chunk j travels to rank j, which averages it in float32 and gives
    it to all. Both ways in 8 bits; the result is the same on every rank, bit by bit. In the communication thread.

    Args:
        flat: floats, 1-d, of a length that the number of ranks divides.
    """
    sent = compress(flat.view(among.size, -1))
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=among.group)
    parts = decompress(got)
    mine = compress((parts.mean(0) if average else parts.sum(0))[None])
    dist.all_gather(list(got), mine[0], group=among.group)  # into the rows of what was got before
    # The own chunk too goes through 8 bits: otherwise ranks would differ.
    if flat.dtype is torch.float32:
        decompress(got, flat.view(among.size, -1))
    else:
        flat.view(among.size, -1).copy_(decompress(got))
