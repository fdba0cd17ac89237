"""dp: one process; each batch is split over its devices."""

from __future__ import annotations

from typing import Any, ClassVar, cast

from torch import nn

from geartrain import Layout, Module, Plan, PlanRequest, Run, UsageError, hookimpl
from geartrain.plugin_api import StepForwarder, overridden
from geartrain_dp.replicas import Replicas


class DataParallelStrategy:
    """Splits each batch over the devices of one process: a replica of the module works on each part, and the parts' outputs come
    together on the first device, in ``*_step_end`` where the module has one."""

    #: The capabilities that the conformance kit may expect.
    capabilities: ClassVar[dict[str, bool]] = {"multi_node": False}

    @hookimpl
    def plan_processes(self, request: PlanRequest) -> Layout:
        if request.num_nodes > 1:
            raise UsageError(
                f"geartrain-dp[dp] drives the devices of one node, not num_nodes={request.num_nodes}. "
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
        return run.model(method, *args)  # evaluation too: its batches are split as well


def refuse(plan: Plan, module: Module | type[Module]) -> None:
    """Refuse what replicas in one process cannot do.

    Raises:
        UsageError: 16-bit precision, manual optimisation, or a ``transfer_batch_to_device`` of the module's own.
    """
    cls = module if isinstance(module, type) else type(module)
    label, precision = plan.strategy.label, plan.precision.name
    if precision.startswith(("16", "bf16")):
        raise UsageError(
            f"{label} trains in 32 or 64 bits, not in {precision}: autocast and the gradient scaler do not reach replicas in threads. "
            "Fix: --precision 32, or --strategy ddp"
        )
    if not module.automatic_optimization:
        raise UsageError(
            f"{label}: {cls.__name__}.automatic_optimization is False, but steps run on replicas, which optimizers do not see. "
            "Fix: automatic optimisation, or --strategy ddp"
        )
    if overridden(module, "transfer_batch_to_device"):
        raise UsageError(
            f"{label}: {cls.__name__}.transfer_batch_to_device would move a batch to one device, but each is split over several. "
            "Fix: on_after_batch_transfer, or --strategy ddp"
        )
