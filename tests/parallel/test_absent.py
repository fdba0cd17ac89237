"""The weights of a rank that has none are NaN, and hold nothing that was in memory before."""

from pathlib import Path

import pytest
import torch

from geartrain_parallel.absent import absent_weights


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (1024, 1024)])
def test_no_element_is_left_over_from_another_tensor(shape, dtype):
    torch.full(shape, 7, dtype=dtype)  # freed at once
    value = absent_weights(shape, dtype)
    assert (value.shape, value.dtype) == (torch.Size(shape), dtype)
    nans = value.isnan().sum().item()
    assert nans == (0 if dtype == torch.int64 else value.numel() if value.numel() < 1000 else 1)
    assert not (value == 7).any()
    assert value.fill_(2).eq(2).all()  # a next run sets them in place


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_a_large_one_takes_no_memory():
    before = resident()
    value = absent_weights((64, 2**20), torch.float32)
    assert value.numel() == 2**26
    assert resident() - before < 2**24
