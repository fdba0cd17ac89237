"""The strategy ``horovod``: one process per device; Horovod averages the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from geartrain import (
    Layout,
    Module,
    Plan,
    PlanRequest,
    Run,
    TrainingError,
    UsageError,
    World,
    hookimpl,
)
from geartrain.parallel import SeveralRanks, shard
from geartrain.plugin_api import user_path, warn
from geartrain_horovod import checks, installed, rates
from geartrain_horovod.collectives import Collectives
from geartrain_horovod.elastic import Elastic, WorldChanged
from geartrain_horovod.gradients import Gradients, Reduction
from geartrain_horovod.launching import Meeting, launcher, start
from geartrain_horovod.wrapped import Wrapped

_NOTHING: AbstractContextManager[None] = nullcontext()
#: Seconds to wait for ranks to start, if ``stall_timeout`` is off.
_TO_MEET = 1800.0
#: The number of runs that this process has started.
_runs = 0


class HorovodStrategy:
    """Reduces gradients with Horovod while backward computes.

    It joins the ranks that horovodrun, mpirun, torchrun or SLURM started. Without a launcher it
    starts one process per device.

    Args:
        scale_lr: multiply every learning rate, also those of schedulers, by the number of workers.
            Ignored if ``op`` is ``"sum"`` or ``"adasum"``, whose steps are longer anyway.
        compression: ``"none"``, or ``"fp16"``: gradients are sent in float16.
        op: how the ranks' gradients are combined: ``"average"``, ``"sum"`` or ``"adasum"``.
        backward_passes_per_step: 1, or equal to ``accumulate_grad_batches``, for programs written
            for Horovod. In manual optimisation any number: a step reduces the accumulated gradient.
        groups: the number of groups of gradients; each group is sent as a whole. ``None``: each
            gradient is sent when it is complete.
        process_set: the ranks whose gradients are reduced; rank 0 must be one of them. Ranks
            outside train alone at the configured learning rates. Like every rank they get rank 0's
            buffers at the end of each epoch. ``None``: all ranks.
        gradient_predivide_factor: averages are divided by this before the sum and multiplied by it
            after the sum, against overflow in float16.
        timeline: a file for Horovod's timeline, which Chrome's tracing shows; rank 0 writes it.
        elastic: for horovodrun's elastic mode, in which workers come and go: resume from the last
            commit, a checkpoint in memory, with the workers that remain. Each epoch starts with a
            commit.
        commit_every_n_steps: with ``elastic``, also commit after this number of steps.
        stall_timeout: seconds that a rank waits for the others in one operation. Then the run ends
            with an error that names the missing rank. 0: no timeout.
        distributed_optimizer: let ``hvd.DistributedOptimizer`` reduce the gradients; parameters
            that no rank uses then get zeros.

    Raises:
        UsageError: an option is invalid, or two options do not go together.

    Source: Sergeev and Del Balso 2018, https://arxiv.org/abs/1802.05799
    """

    def __init__(
        self,
        scale_lr: bool = True,
        compression: str = "none",
        op: str = "average",
        backward_passes_per_step: int = 1,
        groups: int | None = None,
        process_set: list[int] | None = None,
        gradient_predivide_factor: float = 1.0,
        timeline: str | None = None,
        elastic: bool = False,
        stall_timeout: float = 1800.0,
        distributed_optimizer: bool = False,
        commit_every_n_steps: int | None = None,
    ) -> None:
        checks.check_numbers(
            backward_passes_per_step=backward_passes_per_step,
            groups=groups,
            gradient_predivide_factor=gradient_predivide_factor,
            stall_timeout=stall_timeout,
            commit_every_n_steps=commit_every_n_steps,
        )
        checks.check_ranks(process_set)
        timeline = (
            None
            if timeline is None
            else str(user_path(timeline, "geartrain-horovod[horovod]: timeline"))
        )
        checks.check_choices(
            op, compression, gradient_predivide_factor, process_set, distributed_optimizer, groups
        )
        checks.check_elastic_options(
            elastic, commit_every_n_steps, process_set=process_set, timeline=timeline, op=op
        )
        approximate = (
            scale_lr or op != "average" or compression != "none" or process_set is not None
        )
        #: Properties that the conformance kit checks.
        self.capabilities = {
            "timeout_option": "stall_timeout",
            "convergence": 0.5 if approximate else None,
            "identical_weights": process_set is None,
            "weighted_loss": op != "adasum" and process_set is None,
        }
        self.op, self.scale_lr, self.timeline = op, scale_lr, timeline
        self.stall_timeout = float(stall_timeout)
        self.passes, self.ranks = backward_passes_per_step, process_set
        self.distributed_optimizer = distributed_optimizer
        self.reduction = Reduction(
            op, compression == "fp16", float(gradient_predivide_factor), groups
        )
        self._elastic = Elastic(commit_every_n_steps) if elastic else None
        self._meeting: Meeting | None = None
        self._failed = False

    @staticmethod
    def diagnose() -> dict[str, Any]:
        """Return Horovod's facts and problems for ``geartrain doctor``."""
        return installed.diagnose()

    def lr_factor(self, size: int, rank: int = 0) -> int:
        """Return the factor of this rank's learning rates in a world of ``size`` ranks."""
        workers = size if self.ranks is None else len(self.ranks) if rank in self.ranks else 1
        return workers if self.scale_lr and self.op == "average" else 1

    # --- before anything starts ------------------------------------------------------------------

    def notes(self, plan: Plan) -> dict[str, str]:
        """Return the lines that the plan shows for this strategy."""
        size = checks.size_of(plan)
        reason = "scale_lr=False" if not self.scale_lr else f"op={self.op!r}"
        factor = (
            "as configured"
            if size is None or self.lr_factor(size) == 1
            else f"× {self.lr_factor(size)}"
        )
        workers = "" if size is None else f", {size} worker(s)"
        alone = (
            []
            if self.ranks is None or size is None
            else [rank for rank in range(size) if rank not in self.ranks]
        )
        scales = self.scale_lr and self.op == "average"
        if self._elastic is not None:  # the same on every rank, also on a rank that joins later
            steps = (
                ""
                if self._elastic.every is None
                else f" and after every {self._elastic.every} steps"
            )
            rates_now = "× current workers (scale_lr)" if scales else f"as configured ({reason})"
            return {
                "elastic": f"a commit at the start of each epoch{steps}",
                "learning rates": rates_now,
            }
        notes = {"learning rates": f"{factor} ({'scale_lr' if scales else reason}{workers})"}
        if alone:
            notes["process set"] = f"ranks {alone} train alone, at rates as configured"
        return notes

    @hookimpl
    def plan_processes(self, request: PlanRequest) -> Layout:
        return Layout(len(request.devices) if launcher() is None else None, 1)

    @hookimpl
    def check_plan(self, plan: Plan, module: Module | type[Module]) -> None:
        checks.check_combination(plan, module, self.op, self.ranks, self.passes)
        # A Session checks the plan again for each model, when Horovod is already initialised.
        if not plan.assumed and self._meeting is None:
            if self._elastic is not None:
                checks.check_elastic(plan.strategy.label)
            checks.check_here(plan, self.op, self.timeline)

    @hookimpl
    def launch(self, run: Run, worker: Callable[[int], Any]) -> Any:
        if self._elastic is not None and run.mode == "session":
            raise UsageError(
                f"{run.plan.strategy.label}: elastic=True does not work in a Session, because only "
                "a Trainer can call the loop again. Fix: use a Trainer, or elastic=False"
            )
        return start(run, worker, self.stall_timeout or _TO_MEET, self._elastic)

    # --- set-up ----------------------------------------------------------------------------------

    @hookimpl
    def setup_process_group(self, run: Run) -> World:
        global _runs
        _runs += 1
        self._failed, elastic = False, self._elastic
        self._meeting = Meeting(
            run, self.stall_timeout or _TO_MEET, self.ranks, self.timeline, elastic is not None
        )
        hvd, ranks = self._meeting.hvd, self._meeting.process_set
        number, gone = (_runs, TrainingError) if elastic is None else (elastic.call, WorldChanged)
        self.collectives = Collectives(
            hvd, number, self.stall_timeout, self._meeting.rendezvous, gone
        )
        self.gradients = Gradients(self.collectives, self.reduction, ranks)
        accumulated = run.plan.options.accumulate_grad_batches
        passes = self.passes if accumulated == 1 else accumulated
        self.wrapped = Wrapped(self.collectives, self.reduction, passes, ranks)
        #: True if this rank reduces gradients with other ranks.
        self._reduces = hvd.size() > 1 and (ranks is None or ranks.included())
        if elastic is not None:  # last: if it fails, teardown_process_group needs all of the above
            elastic.agree(run, self.collectives)
        return World(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank())

    @hookimpl
    def make_coordinator(self) -> SeveralRanks:
        return SeveralRanks()

    @hookimpl
    def shard_dataloader(self, run: Run, loader: Iterable[Any], stage: str) -> Iterable[Any]:
        return shard(run, loader, stage)

    @hookimpl
    def wrap_model(self, run: Run, model: nn.Module) -> nn.Module:
        model = model.to(run.device)
        if run.world.size > 1:
            # named_buffers() adds the buffers that are not persistent.
            state = {**model.state_dict(keep_vars=True), **dict(model.named_buffers())}
            self.collectives.broadcast_tensors(
                {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
            )
        return model

    @hookimpl
    def wrap_optimizer(self, run: Run, optimizer: Optimizer) -> Optimizer:
        if (
            run.loop.needs_closure
            and self._meeting is not None
            and self._meeting.process_set is not None
        ):
            raise UsageError(
                f"{run.plan.strategy.label}: {type(optimizer).__name__} decides how often it calls "
                f"its closure, and ranks outside process_set={self.ranks} may call it more or less "
                "often than ranks inside. Fix: use another optimizer, or no process_set"
            )
        if run.world.size > 1:
            # Not by broadcast_optimizer_state: it takes a step with zero gradients to get a state.
            state = self.collectives.broadcast(optimizer.state_dict(), 0)
            if run.world.rank:
                optimizer.load_state_dict(state)
        rates.scale(
            optimizer,
            [schedule.scheduler for schedule in run.schedulers],
            self.lr_factor(run.world.size, run.world.rank),
        )
        if self._reduces and self.distributed_optimizer:
            self.wrapped.add(run, optimizer)
        elif self._reduces:
            self.gradients.watch(run)
        return optimizer

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        """Scale the learning rates of a resumed run: the number of workers may have changed."""
        if run.loop.resumed is None:
            return
        schedulers = [schedule.scheduler for schedule in run.schedulers]
        factor = self.lr_factor(run.world.size, run.world.rank)
        before = {rates.scale(optimizer, schedulers, factor) for optimizer in run.optimizers}
        if before - {factor} and run.world.rank == 0:
            was = ", ".join(f"× {one}" for one in sorted(before))
            warn(
                f"learning rates of the checkpoint were {was} and are now × {factor}, as in the "
                "plan"
            )
        if (
            run.world.rank == 0
            and self._meeting is not None
            and self._meeting.process_set is not None
        ):
            warn(
                f"ranks outside process_set={self.ranks} resume from rank 0's weights: a "
                "checkpoint has no others"
            )

    @hookimpl
    def on_epoch_start(self, run: Run) -> None:
        if self._elastic is not None:
            self._elastic.commit_epoch(run, self.collectives)

    # --- a step ----------------------------------------------------------------------------------

    @hookimpl
    def micro_step(self, run: Run, first: bool, last: bool) -> AbstractContextManager[Any]:
        # Gradients are sent during the last micro-batch before a step. In manual optimisation and
        # in a Session that micro-batch is unknown, so gradients are sent when the step is taken.
        if not self._reduces or run.mode != "automatic":
            return _NOTHING
        if self.distributed_optimizer:
            return self.wrapped.early()
        return self.gradients.early() if last else _NOTHING

    @hookimpl
    def reduce_gradients(self, run: Run) -> None:
        if self._reduces:
            self.wrapped.reduce(run) if self.distributed_optimizer else self.gradients.reduce(run)

    @hookimpl
    def on_step_end(self, run: Run) -> None:
        if self._elastic is not None:
            self._elastic.commit_step(run, self.collectives)

    # --- collectives -----------------------------------------------------------------------------

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

    # --- the end ---------------------------------------------------------------------------------

    @hookimpl
    def on_exception(self) -> None:
        self._failed = True
        if self._meeting is not None:
            self.collectives.say_here()

    @hookimpl
    def teardown_process_group(self) -> None:
        if self._meeting is not None:
            meeting, self._meeting = self._meeting, None
            try:
                self.gradients.close()
                self.wrapped.close()
            finally:
                meeting.end(self._failed, self.collectives.leave)
