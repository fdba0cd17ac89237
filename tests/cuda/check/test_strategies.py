"""Strategies of several processes, on one rank, and on two ranks that share the device."""

import json
from importlib.util import find_spec

import pytest
import several_ranks
import torch

from .device import BACKEND, DEVICE, ON_DEVICE, assert_equal, fit, run
from .programs import train

pytestmark = ON_DEVICE

#: Strategy and options of runs whose result is that of one process.
EXACT = {
    "ddp": {},
    "ddp_spawn": {},
    "fsdp": {"units": ["Linear"]},
    "ddp_sharded": {},
    "tensor_parallel": {"colwise": ["net.0"], "rowwise": ["net.3"]},
    "bagua": {"algorithm": "gradient_allreduce"},
    "deepspeed": {"stage": 2},
}
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="no DeepSpeed")
NAMES = [pytest.param(name, marks=needs_deepspeed if name == "deepspeed" else []) for name in EXACT]


def spawn(folder, *arguments):
    """Train by a script, as ddp_spawn does, and return the backend and the weights."""
    file = folder / "weights.pt"
    run("programs.py", json.dumps([str(file), *arguments]))
    return torch.load(file)


@pytest.fixture(scope="module")
def right():
    return fit()


@pytest.mark.parametrize("name", NAMES)
def test_one_rank(name, tmp_path, right):
    arguments = name, 1, EXACT[name] | ({"size": 1} if name == "tensor_parallel" else {}), 8
    backend, weights = spawn(tmp_path, *arguments) if name == "ddp_spawn" else train(*arguments)
    assert name == "ddp_spawn" or backend == BACKEND
    assert_equal(weights, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_that_share_the_device_over_gloo(name, tmp_path, right):
    """NCCL refuses two ranks on one GPU. gloo may refuse an operation on a GPU's tensors."""
    # Two ranks that have one model together see the batches of one process.
    batch, more = (8, {"size": 2}) if name == "tensor_parallel" else (4, {})
    arguments = name, 2, EXACT[name] | {"process_group_backend": "gloo"} | more, batch
    if name == "ddp_spawn":
        _, weights = spawn(tmp_path, *arguments)
    else:
        rank = several_ranks.run(tmp_path, train, *arguments)[0]
        if DEVICE == "cuda" and "Fix: " in rank.error:
            pytest.skip(f"refused: {rank.error}")
        assert rank.result is not None, rank.printed
        backend, weights = rank.result
        assert backend == "gloo"
    assert_equal(weights, right, rtol=1e-4, atol=1e-5)
