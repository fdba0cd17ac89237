"""The strategy dp: one process, which splits each batch over its devices."""

from __future__ import annotations

from typing import Any, ClassVar, cast

from torch import nn

from geartrain import Layout, Module, Plan, PlanRequest, Run, UsageError, hookimpl
from geartrain.plugin_api import StepForwarder, overridden
from geartrain_dp.replicas import Replicas


class DataParallelStrategy:
    """Strategy ``dp``: one process splits each batch over its devices.

    A replica of the module runs each part. The outputs are collected on the first device, in
    ``*_step_end`` if the module has it.
    """

    #: Read by the conformance kit.
    capabilities: ClassVar[dict[str, bool]] = {"multi_node": False}

    @hookimpl
    def plan_processes(self, request: PlanRequest) -> Layout:
        if request.num_nodes > 1:
            raise UsageError(
                f"geartrain-dp[dp] uses devices of one node, not num_nodes={request.num_nodes}. "
                "Fix: --strategy ddp2, which does the same on each node"
            )
        return Layout(1, len(request.devices))

    @hookimpl
    def check_plan(self, plan: Plan, module: Module | type[Module]) -> None:
        refuse(plan, module)

    @hookimpl
    def wrap_model(self, run: Run, model: nn.Module) -> nn.Module:
        return Replicas(run, cast(StepForwarder, model.to(run.device)), run.plan.strategy.label)

    @hookimpl
    def forward(self, run: Run, method: str, args: tuple[Any, ...]) -> Any:
        assert run.model is not None
        return run.model(method, *args)  # evaluation batches are split as well


def refuse(plan: Plan, module: Module | type[Module]) -> None:
    """Raise if the plan or the module needs a feature that replicas in one process lack.

    Args:
        plan: the plan, with precision and strategy.
        module: the user's module or its class.

    Raises:
        UsageError: 16-bit precision, manual optimisation, or a module that overrides
            ``transfer_batch_to_device``.
    """
    cls = module if isinstance(module, type) else type(module)
    label, precision = plan.strategy.label, plan.precision.name
    if precision.startswith(("16", "bf16")):
        raise UsageError(
            f"{label} trains in 32 or 64 bits, not in {precision}: autocast and the gradient "
            "scaler do not work for replicas in threads. Fix: --precision 32, or --strategy ddp"
        )
    if not module.automatic_optimization:
        raise UsageError(
            f"{label}: {cls.__name__}.automatic_optimization is False, but steps run on replicas, "
            "which optimizers do not see. Fix: use automatic optimisation, or --strategy ddp"
        )
    if overridden(module, "transfer_batch_to_device"):
        raise UsageError(
            f"{label}: {cls.__name__}.transfer_batch_to_device would move a batch to one device, "
            "but the strategy splits it over several. "
            "Fix: on_after_batch_transfer, or --strategy ddp"
        )
