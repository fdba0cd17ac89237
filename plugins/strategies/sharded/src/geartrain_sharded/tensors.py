"""Whole tensors from sharded ones, and back: for checkpoints and after a run."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from geartrain import TrainingError

#: Bytes from which a whole tensor gets a file, and memory of its own.
_SMALL = 2**20


def whole(tensor: Any, keep: bool, folder: Path | None) -> torch.Tensor:
    """Gather a sharded tensor; return any other one as it is. Every rank calls it.

    Args:
        tensor: a parameter, or a state of its shape.
        keep: False on ranks that need no result. They get an empty tensor.
        folder: for the file of the result; ``None``: the system's temporary folder.

    Returns:
        A whole tensor in the memory of a file, if the given one is sharded: all whole tensors of a
        model may be larger than the memory of a rank.

    Raises:
        TrainingError: the file cannot be written.
    """
    if not isinstance(tensor, DTensor):
        return cast("torch.Tensor", tensor)
    shard: Any = tensor.detach()
    gathered: torch.Tensor = shard.full_tensor()
    if not keep:
        return gathered.new_empty(0)
    return gathered.cpu() if gathered.nbytes < _SMALL else _in_file(gathered, folder)


def _in_file(tensor: torch.Tensor, folder: Path | None) -> torch.Tensor:
    """Return a copy whose memory is a file that has no name, so nothing can leave it behind.

    The system may write its pages to the file and drop them. As in other memory, what this process
    writes there afterwards stays its own.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            if hasattr(os, "posix_fallocate"):  # in a file with holes a full disk kills the process
                os.posix_fallocate(file.fileno(), 0, tensor.nbytes)
            file.truncate(tensor.nbytes)
            shared = mmap.mmap(file.fileno(), tensor.nbytes)
            torch.frombuffer(shared, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)
            # A process that is forked later would change a shared one for both.
            private = mmap.mmap(file.fileno(), tensor.nbytes, access=mmap.ACCESS_COPY)
    except OSError as error:
        place = folder or tempfile.gettempdir()
        message = f"rank 0 has no room for the whole weights in {place}: {error.strerror}"
        raise TrainingError(f"{message}. Fix: output= a folder with more room") from error
    return torch.frombuffer(private, dtype=tensor.dtype).view(tensor.shape)


def return_freed_tensors() -> None:
    """Let the allocator of glibc return tensors of ``_SMALL`` bytes and more when they are freed.

    It keeps up to 32 MiB of each by default. Gathered parameters then took seven times the memory
    of a rank's part, after some steps of a model with layers of 4 MiB.
    """
    is_set = "MALLOC_MMAP_THRESHOLD_" in os.environ
    if sys.platform == "linux" and not is_set and hasattr(ctypes.CDLL(None), "mallopt"):
        ctypes.CDLL(None).mallopt(-3, _SMALL)  # M_MMAP_THRESHOLD of malloc.h


def sharded_as(value: Any, like: torch.Tensor) -> Any:
    """Return this rank's shard of a whole tensor that every rank has.

    Args:
        value: anything; only a tensor of the shape of ``like`` is sharded.
        like: a parameter.
    """
    is_whole = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    return part_of(like, value) if is_whole and value.shape == like.shape else value


def part_of(like: torch.Tensor, value: torch.Tensor) -> Any:
    """Return this rank's part of a tensor that every rank has, split as a parameter is."""
    if not isinstance(like, DTensor):
        return value
    value, placements = value.to(like.device), list(like.placements)
    # Without a source no rank sends anything: each takes its shard of its own copy.
    return distribute_tensor(value, like.device_mesh, placements, src_data_rank=None)


def shard_model_state(state: dict[str, Any], present: Mapping[str, Any]) -> None:
    """Replace whole tensors by shards, in place.

    Args:
        state: by name.
        present: the module's own state, by name.
    """
    for name in state.keys() & present.keys():
        state[name] = sharded_as(state[name], present[name])


def sharded_optimizer_state(
    optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> dict[str, Any]:
    """Return an optimizer's ``state_dict()`` with shards instead of whole tensors."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    of = dict(zip(numbers, parameters, strict=True))
    slots = {
        number: {name: sharded_as(value, of[number]) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": slots}
