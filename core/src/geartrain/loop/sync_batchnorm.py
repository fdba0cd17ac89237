"""``sync_batchnorm``: BatchNorm layers use the statistics of all ranks during ``fit``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from geartrain.errors import TrainingError, UsageError

if TYPE_CHECKING:
    from geartrain.loop.run import Run
    from geartrain.plan import Plan

_OF_TORCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def check_sync_batchnorm(plan: Plan, module: Any) -> None:
    """Refuse ``sync_batchnorm`` in a plan, or for a module, with which it cannot work.

    Args:
        module: the module, or its class, whose layers are not known.

    Raises:
        UsageError: several devices in one process, several processes on the CPU, or a layer whose
            own methods would be lost.
    """
    if not plan.options.sync_batchnorm:
        return
    if plan.layout.devices_per_process > 1:
        what = f"{plan.strategy.label} has one process for several devices"
        raise UsageError(f"sync_batchnorm=True: {what}. Fix: --strategy ddp")
    # Its forward in training mode raises ValueError if a process group exists.
    if plan.processes != 1 and plan.accelerator.name == "cpu":
        what = "torch.nn.SyncBatchNorm cannot train on the CPU with several processes"
        raise UsageError(f"sync_batchnorm=True: {what}. Fix: leave it out, or use GPUs")
    if isinstance(module, nn.Module):
        _layers(module)


def _layers(module: nn.Module) -> list[_BatchNorm]:
    layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    if own := sorted({type(one).__name__ for one in layers if type(one) not in _OF_TORCH}):
        what = f"{', '.join(own)} would lose its own methods as SyncBatchNorm"
        fix = "leave sync_batchnorm out, and use a layer that synchronizes itself"
        raise UsageError(f"sync_batchnorm=True: {what}. Fix: {fix}")
    return layers


def synchronize(run: Run) -> Callable[..., None]:
    """Make the module's BatchNorm layers ``torch.nn.SyncBatchNorm``; return the undo function.

    Only a layer's class changes: its parameters, buffers, hooks and names in checkpoints stay.

    Raises:
        TrainingError: the strategy does not use torch.distributed.
        UsageError: a layer's own methods would be lost.
    """
    if not torch.distributed.is_initialized():
        what = f"{run.plan.strategy.label} has no process group of torch.distributed"
        raise TrainingError(f"sync_batchnorm=True: {what}. Fix: --strategy ddp")
    layers = [one for one in _layers(run.module) if type(one) is not nn.SyncBatchNorm]
    if not layers and run.world.rank == 0:
        what = f"{type(run.module).__name__} has no BatchNorm layer"
        warnings.warn(f"sync_batchnorm=True changes nothing: {what}", stacklevel=2)
    before = [type(layer) for layer in layers]
    for layer in layers:
        vars(layer)["process_group"] = None  # the default group
        layer.__class__ = nn.SyncBatchNorm

    def restore(run: Run) -> None:
        for layer, was in zip(layers, before, strict=True):
            del vars(layer)["process_group"]
            layer.__class__ = was

    return restore
