"""Means of known gradients on four ranks of two nodes: in 8 and 16 bits, in full, hierarchical."""

import os

import pytest
import torch
from several_ranks import kept_by
from torch import nn

import geartrain as gt
from geartrain_bagua.minmax_uint8 import decode_plain, encode_plain

from .cases import bagua

#: Case -> the strategy's options. In two buckets, 33 and 68 elements are padded to 36 and 68; in
#: one bucket, the 101 elements are padded to 104.
CASES = {
    "gradient_allreduce": {},
    "gradient_allreduce, hierarchical": {"hierarchical": True},
    "gradient_allreduce, summed": {"average": False},
    "gradient_allreduce, hierarchical, summed": {"hierarchical": True, "average": False},
    "bytegrad": {"algorithm": "bytegrad", "hierarchical": False},
    "bytegrad, two buckets": {"algorithm": "bytegrad", "hierarchical": False, "bucket_bytes": 4},
    "bytegrad, summed": {"algorithm": "bytegrad", "hierarchical": False, "average": False},
    "bytegrad, hierarchical": {"algorithm": "bytegrad"},
    "bytegrad, hierarchical, summed": {"algorithm": "bytegrad", "average": False},
    "half of fp16": {"algorithm": "half", "dtype": "fp16"},
    "half of bf16": {"algorithm": "half"},
    "half of bf16, two buckets": {"algorithm": "half", "bucket_bytes": 4},
}


class Known(gt.Module):
    """Its gradients are known numbers, different on each rank."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(4, 17)), nn.Parameter(torch.zeros(33))

    def training_step(self, batch, batch_idx):
        random = torch.Generator().manual_seed(self.trainer.global_rank)
        gradients = torch.randn(101, generator=random)
        return (self.a.flatten() * gradients[33:]).sum() + (self.b * gradients[:33]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1.0)


def train_each_case():
    """Return what one step of each case has subtracted from the weights, in a bucket's order."""
    node, local_rank = divmod(int(os.environ["RANK"]), 2)
    os.environ.update(NODE_RANK=str(node), LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE="2")
    found = {}
    for name, options in CASES.items():
        module = Known()
        bagua(2, strategy=options, num_nodes=2).fit(module, [0])
        found[name] = -torch.cat([module.b.detach(), module.a.detach().flatten()])
    return found


four_ranks = kept_by(train_each_case, ranks=4)


def gradients():
    """Return all ranks' gradients, [4, 101], in the order of the bucket: last parameter first."""
    return torch.stack(
        [torch.randn(101, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    )


def through_8_bits(chunks):
    return decode_plain(*encode_plain(chunks))


def eight_bits(flats, average, pad):
    """Return the mean or sum of ``flats``, [n, d], as n ranks compute it."""
    n, d = flats.shape
    parts = torch.cat([flats, torch.zeros(n, pad)], 1).view(n, n, -1)  # [of rank, chunk, element]
    sent = torch.stack([through_8_bits(part) for part in parts])
    return through_8_bits(sent.mean(0) if average else sent.sum(0)).flatten()[:d]


def expected(name):
    g = gradients()
    nodes = torch.stack([g[:2].mean(0), g[2:].mean(0)])
    match name:
        case "gradient_allreduce" | "gradient_allreduce, hierarchical":
            return g.mean(0)
        case "gradient_allreduce, summed" | "gradient_allreduce, hierarchical, summed":
            return g.sum(0)
        case "bytegrad":
            return eight_bits(g, True, 3)
        case "bytegrad, two buckets":
            return torch.cat([eight_bits(g[:, :33], True, 3), eight_bits(g[:, 33:], True, 0)])
        case "bytegrad, summed":
            return eight_bits(g, False, 3)
        case "bytegrad, hierarchical":
            return eight_bits(nodes, True, 3)
        case "bytegrad, hierarchical, summed":
            return eight_bits(2 * nodes, False, 3)
        case "half of fp16":
            return (g / 4).half().sum(0).float()
    return (g / 4).bfloat16().sum(0).float()


@pytest.mark.parametrize("name", CASES)
def test_four_ranks_compute_the_formula(four_ranks, name):
    tolerance = 8e-3 if "bf16" in name else 1e-3 if "fp16" in name else 1e-6
    for kept in four_ranks:
        assert torch.equal(kept[name], four_ranks[0][name])
    torch.testing.assert_close(four_ranks[0][name], expected(name), rtol=tolerance, atol=tolerance)


def test_8_bits_are_not_full_precision(four_ranks):
    exact = gradients().mean(0)
    for name in ("bytegrad", "bytegrad, hierarchical", "half of bf16"):
        assert 1e-4 < (four_ranks[0][name] - exact).abs().max() < 0.05
