"""Whole tensors from sharded ones, and back: for checkpoints and after a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: Any, keep: bool) -> torch.Tensor:
    """Gather a sharded tensor; return any other one as it is. Every rank calls it.

    Args:
        tensor: a parameter, or a state of its shape.
        keep: False on ranks that need no result. They get an empty tensor.

    Returns:
        A whole tensor on the CPU, if the given one is sharded.
    """
    if not isinstance(tensor, DTensor):
        return cast("torch.Tensor", tensor)
    shard: Any = tensor.detach()
    gathered: torch.Tensor = shard.full_tensor()
    return gathered.cpu() if keep else gathered.new_empty(0)


def sharded_as(value: Any, like: torch.Tensor) -> Any:
    """Return this rank's shard of a whole tensor that every rank has.

    Args:
        value: anything; only a tensor of the shape of ``like`` is sharded.
        like: a parameter.
    """
    if not isinstance(like, DTensor) or not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, DTensor) or value.shape != like.shape:
        return value
    value = value.to(like.device)
    # Without a source no rank sends anything: each takes its shard of its own copy.
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


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
