"""ddp2: dp inside a node, ddp across nodes."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from geartrain import Layout, Module, Plan, PlanRequest, Run, hookimpl
from geartrain.plugin_api import StepForwarder
from geartrain_ddp import DDPStrategy
from geartrain_dp.replicas import Replicas
from geartrain_dp.strategy import refuse


class DDP2Strategy(DDPStrategy):
    """Strategy ``ddp2``: one process per node, which splits each batch over the node's devices.

    Gradients are averaged over the nodes during backward, once per step. The options are those of
    :class:`~geartrain_ddp.DDPStrategy`.
    """

    def ddp_device_ids(self, run: Run) -> None:
        """Return ``None``: the replicas move each part to its device, so DDP must move nothing."""

    @hookimpl
    def plan_processes(self, request: PlanRequest) -> Layout:
        return Layout(1, len(request.devices))

    @hookimpl  # hooks are called by argument name, so the override may add one
    def check_plan(self, plan: Plan, module: Module | type[Module]) -> None:  # type: ignore[override]
        super().check_plan(plan)
        refuse(plan, module)

    @hookimpl
    def wrap_model(self, run: Run, model: nn.Module) -> nn.Module:
        return super().wrap_model(
            run, Replicas(run, cast(StepForwarder, model), run.plan.strategy.label)
        )

    @hookimpl
    def forward(self, run: Run, method: str, args: tuple[Any, ...]) -> Any:
        model = run.model
        assert model is not None
        if not torch.is_grad_enabled() and isinstance(model, DistributedDataParallel):
            # DDP's forward may communicate, but nodes may have unequal numbers of batches.
            model = model.module
        return model(method, *args)
