"""``sync_batchnorm``: BatchNorm layers use the statistics of all ranks during ``fit``."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from geartrain import Module, Plan, Run, TrainingError, UsageError, hookimpl
from geartrain.plugin_api import warn

_OF_TORCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class SyncBatchNorm:
    """Makes the module's BatchNorm layers ``torch.nn.SyncBatchNorm`` during ``fit``.

    Only a layer's class changes: its parameters, buffers, hooks and names in checkpoints stay.
    """

    added_for = "sync_batchnorm=True"

    def __init__(self) -> None:
        #: Changed layers, each with its own class.
        self._changed: list[tuple[nn.Module, type[nn.Module]]] = []

    @hookimpl
    def check_plan(self, plan: Plan, module: Module | type[Module]) -> None:
        """Refuse several devices in one process, several processes on the CPU, some layers."""
        if plan.layout.devices_per_process > 1:
            message = f"{plan.strategy.label} has one process for several devices"
            raise UsageError(f"sync_batchnorm=True: {message}. Fix: --strategy ddp")
        # Its forward in training mode raises ValueError if a process group exists.
        if plan.processes != 1 and plan.accelerator.name == "cpu":
            message = "torch.nn.SyncBatchNorm cannot train on the CPU with several processes"
            raise UsageError(f"sync_batchnorm=True: {message}. Fix: leave it out, or use GPUs")
        if isinstance(module, nn.Module):  # of a class, the layers are not known
            _layers(module)

    @hookimpl(wrapper=True)
    def wrap_model(self, run: Run) -> Generator[None, Any, Any]:
        if run.world.size > 1:
            self._synchronize(run)
        return (yield)

    def _synchronize(self, run: Run) -> None:
        if not torch.distributed.is_initialized():
            message = f"{run.plan.strategy.label} has no process group of torch.distributed"
            raise TrainingError(f"sync_batchnorm=True: {message}. Fix: --strategy ddp")
        layers = [one for one in _layers(run.module) if type(one) is not nn.SyncBatchNorm]
        if not layers and run.world.rank == 0:
            message = f"{type(run.module).__name__} has no BatchNorm layer"
            warn(f"sync_batchnorm=True changes nothing: {message}")
        for layer in layers:
            self._changed.append((layer, type(layer)))
            vars(layer)["process_group"] = None  # the default group
            layer.__class__ = nn.SyncBatchNorm

    @hookimpl(wrapper=True)
    def teardown_process_group(self) -> Generator[None, Any, Any]:
        while self._changed:
            layer, own_class = self._changed.pop()
            del vars(layer)["process_group"]
            layer.__class__ = own_class
        return (yield)


def _layers(module: nn.Module) -> list[_BatchNorm]:
    layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    if unknown := sorted({type(one).__name__ for one in layers if type(one) not in _OF_TORCH}):
        message = f"{', '.join(unknown)} would lose its own methods as SyncBatchNorm"
        hint = "leave sync_batchnorm out, and use a layer that synchronizes itself"
        raise UsageError(f"sync_batchnorm=True: {message}. Fix: {hint}")
    return layers
