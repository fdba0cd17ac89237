"""One process a device; gradients averaged by Horovod.

Horovod: Sergeev and Del Balso 2018, https://arxiv.org/abs/1802.05799
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from geartrain import Layout, Module, Plan, PlanRequest, Run, UsageError, World, hookimpl
from geartrain_horovod import installed, rates
from geartrain_horovod.collectives import Collectives
from geartrain_horovod.gradients import Gradients, Reduction
from geartrain_horovod.launching import Meeting, launcher, start

_NOTHING: AbstractContextManager[None] = nullcontext()
#: How many runs this program has begun.
_runs = 0


class HorovodStrategy:
    """Joins the ranks that horovodrun, mpirun, torchrun or SLURM started, or starts one process a device itself, and averages gradients
    with Horovod while backward computes.

    Args:
        scale_lr: multiply every learning rate by the number of workers; with ``op="sum"`` or ``"adasum"``, which make the step longer
            themselves, nothing is multiplied.
        compression: ``"none"``, or ``"fp16"``: gradients travel in float16.
        op: ``"average"``, ``"sum"`` or ``"adasum"`` of the gradients.
        stall_timeout: seconds that a rank waits for the others in one operation before the run ends with an error.

    Raises:
        UsageError: an option that cannot be.
    """

    #: What the conformance kit may expect.
    capabilities = {"timeout_option": "stall_timeout"}

    def __init__(
        self,
        scale_lr: bool = True,
        compression: str = "none",
        op: str = "average",
        stall_timeout: float = 1800.0,
    ) -> None:
        self.scale_lr, self.stall_timeout = scale_lr, stall_timeout
        self.reduction = Reduction(op, compression == "fp16")
        self._meeting: Meeting | None = None
        self._failed = False

    @staticmethod
    def diagnose() -> dict[str, Any]:
        """What ``geartrain doctor`` shows of Horovod, and what is missing."""
        return installed.diagnose()

    # --- hooks -----------------------------------------------------------------------------------------------------------

    @hookimpl
    def plan_processes(self, request: PlanRequest) -> Layout:
        return Layout(len(request.devices) if launcher() is None else None, 1)

    @hookimpl
    def check_plan(self, plan: Plan, module: Module | type[Module]) -> None:
        if not plan.assumed and (reason := installed.missing()):
            raise UsageError(f"{plan.strategy.label}: {reason}")

    @hookimpl
    def launch(self, run: Run, worker: Callable[[int], Any]) -> Any:
        return start(run, worker, self.stall_timeout)

    @hookimpl
    def setup_process_group(self, run: Run) -> World:
        global _runs
        _runs += 1
        self._failed = False
        self._meeting = Meeting(run, self.stall_timeout, [])
        hvd = self._meeting.hvd
        self.collectives = Collectives(hvd, _runs, self.stall_timeout)
        self.gradients = Gradients(self.collectives, self.reduction)
        return World(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank())

    @hookimpl
    def wrap_model(self, run: Run, model: nn.Module) -> nn.Module:
        model = model.to(run.device)
        state = model.state_dict(keep_vars=True)
        if run.world.size > 1:
            self.collectives.broadcast_tensors({name: value for name, value in state.items() if isinstance(value, torch.Tensor)})
        return model

    @hookimpl
    def wrap_optimizer(self, run: Run, optimizer: Optimizer) -> Optimizer:
        if run.world.size > 1:
            state = self.collectives.broadcast(optimizer.state_dict(), 0)
            if run.world.rank:
                optimizer.load_state_dict(state)
        if self.scale_lr and self.reduction.op == "average":
            rates.scale(optimizer, [schedule.scheduler for schedule in run.schedulers], run.world.size)
        return optimizer

    @hookimpl
    def micro_step(self, run: Run, first: bool, last: bool) -> AbstractContextManager[Any]:
        # Gradients stay on this rank until the window's last micro-batch. In manual optimisation and in a Session nobody can tell which
        # backward is the last before a step: there they are sent when it comes.
        return self.gradients.early() if last and run.automatic and not run.own_loop and run.world.size > 1 else _NOTHING

    @hookimpl
    def reduce_gradients(self, run: Run) -> None:
        if run.world.size > 1:
            self.gradients.reduce(run)

    @hookimpl
    def log_sync(self, values: torch.Tensor) -> torch.Tensor:
        return self.collectives.gather_values(values)

    @hookimpl
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
        return self.collectives.gather(tensor)

    @hookimpl
    def broadcast(self, obj: Any, src: int) -> Any:
        return self.collectives.broadcast(obj, src)

    @hookimpl
    def barrier(self) -> None:
        self.collectives.barrier()

    @hookimpl
    def on_exception(self) -> None:
        self._failed = True

    @hookimpl
    def teardown_process_group(self) -> None:
        if self._meeting is not None:
            self.gradients.close()
            meeting, self._meeting = self._meeting, None
            meeting.end(self._failed)
