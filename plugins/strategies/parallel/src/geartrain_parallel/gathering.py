"""``all_gather`` of several tensors, with their gradients on request."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from geartrain import Run, TrainingError
from geartrain.plugin_api import warn
from geartrain_parallel.collectives import of_data_ranks


def gather(
    run: Run, tensors: list[torch.Tensor], sync_grads: bool
) -> list[torch.Tensor | list[torch.Tensor]]:
    """Return each tensor of all ranks with other data. Every rank must call this.

    Args:
        run: this rank's run.
        tensors: this rank's tensors.
        sync_grads: each rank's tensor gets the sum of its gradients on all ranks.

    Raises:
        TrainingError: ranks have different numbers of tensors, or other tensors with gradients; or
            ranks have parts of one model, and gradients are wanted.
    """
    differentiable = [torch.is_grad_enabled() and tensor.requires_grad for tensor in tensors]
    synced = bytes(differentiable) if sync_grads else bytes(len(tensors))
    header = torch.tensor([len(tensors), zlib.crc32(synced)], dtype=torch.float64)
    counts, digests = run.hooks.log_sync(run=run, values=header).long().T.tolist()
    # gloo ends the process on collectives that do not match, and Python cannot catch it.
    if len(set(counts)) > 1:
        raise TrainingError(
            f"all_gather: ranks bring different numbers of tensors, {counts}. "
            "Fix: torch.cat them on each rank first; first dimensions may differ"
        )
    if len(set(digests)) > 1:
        raise TrainingError(
            "all_gather(..., sync_grads=True): ranks bring other tensors that require gradients, "
            "so their backwards would deadlock. Fix: use the same call on every rank"
        )
    if any(differentiable) and not sync_grads and run.world.rank == 0:
        warn(
            "all_gather: a tensor requires gradients, and the result has none. "
            "Fix: sync_grads=True to train on it, or .detach() the tensor"
        )
    if any(synced) and run.world.data_size < run.world.size:
        raise TrainingError(
            f"all_gather(..., sync_grads=True): {run.plan.strategy.label} has ranks with parts of "
            "one model, whose gradients would be added up. Fix: --strategy fsdp"
        )
    return [
        _with_gradients(run, tensor)
        if wanted
        else of_data_ranks(run, run.hooks.all_gather(run=run, tensor=tensor))
        for tensor, wanted in zip(tensors, synced, strict=True)
    ]


def _with_gradients(run: Run, tensor: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
    gathered: Any = _Gather.apply(run, tensor)  # type: ignore[no-untyped-call]
    return gathered if isinstance(gathered, torch.Tensor) else list(gathered)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, tensor: torch.Tensor) -> Any:
        ctx.run, gathered = run, run.hooks.all_gather(run=run, tensor=tensor)
        return gathered if isinstance(gathered, torch.Tensor) else tuple(gathered)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        """Return the sum of this rank's gradients on all ranks."""
        run = ctx.run
        by_rank = gradients[0] if len(gradients) == 1 else gradients
        for rank in range(run.world.size):  # one at a time, to use less memory
            table = run.hooks.all_gather(run=run, tensor=by_rank[rank])
            if rank == run.world.rank:
                total = table.sum(0)
        return None, total
