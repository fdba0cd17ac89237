"""Tensors of which each rank has a part (DTensor), as those of ``fsdp``.

torch's module of DTensor is imported only if there are such tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def is_sharded(tensor: torch.Tensor) -> bool:
    """True for a DTensor."""
    return hasattr(tensor, "full_tensor")


def is_of_zero(parameter: nn.Parameter) -> bool:
    """True for a parameter of ZeRO of DeepSpeed: ranks have parts of it or of its states."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")


def local(tensor: Any) -> torch.Tensor:
    """Return this rank's part, in the same memory; any other tensor as it is."""
    part: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def whole(tensor: Any) -> torch.Tensor:
    """Return the whole tensor; every rank calls it. Any other tensor is returned as it is."""
    gathered: torch.Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return gathered


def whole_of(part: torch.Tensor, like: Any) -> torch.Tensor:
    """Return the whole tensor of parts that are sharded as ``like``; every rank calls it."""
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    placement = {"device_mesh": like.device_mesh, "placements": like.placements}
    return whole(DTensor.from_local(part, **placement, shape=like.shape, stride=like.stride()))


def part_of(tensor: torch.Tensor, like: Any) -> torch.Tensor:
    """Return this rank's part of a whole tensor that every rank has, sharded as ``like``."""
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    # Without a source no rank sends anything.
    mesh, tensor = like.device_mesh, tensor.to(like.device)
    return local(distribute_tensor(tensor, mesh, like.placements, src_data_rank=None))


def norms_of_wholes(norms: torch.Tensor, tensors: Sequence[Any], order: float) -> torch.Tensor:
    """Return the norms of whole tensors from those of this rank's parts; every rank calls it.

    Args:
        norms: ``[len(tensors)]``, of the parts.
        order: of the norms.
    """
    groups: dict[tuple[Any, Any], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if is_sharded(tensor):
            groups.setdefault((tensor.device_mesh, tensor.placements), []).append(index)
    for (mesh, placements), indices in groups.items():
        from torch.distributed.tensor import DTensor, Partial, Replicate

        is_maximum = math.isinf(order)
        partial = Partial("max" if is_maximum else "sum")
        over = [Replicate() if each.is_replicate() else partial for each in placements]
        powers = norms[indices] if is_maximum else norms[indices] ** order
        total = whole(DTensor.from_local(powers, mesh, over))
        norms[indices] = total if is_maximum else total ** (1 / order)
    return norms
