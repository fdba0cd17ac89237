"""Whole tensors are in files without a name, which only their process changes."""

import errno
import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from geartrain import TrainingError
from geartrain_sharded import tensors
from geartrain_sharded.tensors import whole


@pytest.fixture
def sharded():
    """Return a function that makes a sharded tensor, on one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    yield lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)])
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("rows", [2, 2**18])
def test_a_whole_tensor_has_its_values(sharded, tmp_path, dtype, rows):
    values = torch.arange(rows * 3).reshape(rows, 3).to(dtype)
    found = whole(sharded(values), True, tmp_path)
    assert type(found) is torch.Tensor
    assert torch.equal(found, values)
    assert list(tmp_path.iterdir()) == []


def test_a_large_tensor_takes_no_memory_that_the_system_cannot_take_back(sharded):
    found = whole(sharded(torch.ones(2**20)), True, None)
    with open("/proc/self/smaps", encoding="utf-8") as file:
        mappings = file.read()
    (place,) = [line for line in mappings.splitlines() if line.startswith(f"{found.data_ptr():x}-")]
    assert "(deleted)" in place


def test_what_a_forked_process_writes_stays_its_own(sharded):
    found = whole(sharded(torch.ones(2**20)), True, None)
    child = os.fork()
    if child == 0:
        found.zero_()
        os._exit(0)
    os.waitpid(child, 0)
    found[0] = 2
    assert found[:2].tolist() == [2, 1]


def test_a_full_disk_is_an_error(sharded, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tensors.os, "posix_fallocate", full)
    message = f"no room for the whole weights in {tmp_path}: No space left on device. Fix: "
    with pytest.raises(TrainingError, match=message):
        whole(sharded(torch.ones(2**20)), True, tmp_path)
    assert whole(sharded(torch.ones(2)), True, tmp_path).tolist() == [1, 1]
