"""One process a device; gradients averaged by Horovod.

Horovod: Sergeev and Del Balso 2018, https://arxiv.org/abs/1802.05799
"""

from __future__ import annotations

import warnings
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
from geartrain.plugin_api import user_path
from geartrain_horovod import checks, installed, rates
from geartrain_horovod.collectives import Collectives
from geartrain_horovod.elastic import Elastic, WorldChanged
from geartrain_horovod.gradients import Gradients, Reduction
from geartrain_horovod.launching import Meeting, launcher, start
from geartrain_horovod.wrapped import Wrapped

_NOTHING: AbstractContextManager[None] = nullcontext()
#: Seconds to wait for ranks to come, where ``stall_timeout`` is off.
_TO_MEET = 1800.0
#: How many runs this process has begun.
_runs = 0


class HorovodStrategy:
    """Joins the ranks that horovodrun, mpirun, torchrun or SLURM started, or starts one process a device itself, and reduces gradients
    with Horovod while backward computes.

    Args:
        scale_lr: multiply every learning rate, those of schedulers too, by the number of workers; not where ``op`` is ``"sum"`` or
            ``"adasum"``, whose steps are longer by themselves.
        compression: ``"none"``, or ``"fp16"``: gradients travel in float16.
        op: what becomes of the ranks' gradients: ``"average"``, ``"sum"`` or ``"adasum"``.
        backward_passes_per_step: 1, or as many as ``accumulate_grad_batches``, as Horovod's programs say it; in manual optimisation
            any, since a step reduces what was added up before it.
        groups: in how many groups gradients travel, each as one; ``None``: each gradient as soon as it is there.
        process_set: the ranks whose gradients are reduced, rank 0 among them; those outside train alone, at learning rates as they are
            configured, and get rank 0's buffers at the end of each epoch as every rank does. ``None``: all.
        gradient_predivide_factor: averages are divided by this before the sum and multiplied after it, against overflow in float16.
        timeline: a file for Horovod's timeline, which Chrome's tracing shows; rank 0 writes it.
        elastic: under horovodrun's elastic mode, whose workers come and go: go on from the last commit, a checkpoint in memory, with
            those that are there. There is a commit at the beginning of each epoch.
        commit_every_n_steps: with ``elastic``, a commit after every so many steps, too.
        stall_timeout: seconds that a rank waits for the others in one operation before the run ends with an error that
            says who did not come; 0: for ever.
        distributed_optimizer: let ``hvd.DistributedOptimizer`` reduce the gradients; parameters that no rank uses then get zeros.

    Raises:
        UsageError: an option that cannot be, or two that cannot go together.
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
        #: What the conformance kit may expect.
        self.capabilities = {
            "timeout_option": "stall_timeout",
            "convergence": 0.5 if approximate else None,
            "identical_weights": process_set is None,
        }
        self.op, self.scale_lr, self.stall_timeout, self.timeline = (
            op,
            scale_lr,
            float(stall_timeout),
            timeline,
        )
        self.passes, self.ranks, self.distributed_optimizer = (
            backward_passes_per_step,
            process_set,
            distributed_optimizer,
        )
        self.reduction = Reduction(
            op, compression == "fp16", float(gradient_predivide_factor), groups
        )
        self._elastic = Elastic(commit_every_n_steps) if elastic else None
        self._meeting: Meeting | None = None
        self._failed = False

    @staticmethod
    def diagnose() -> dict[str, Any]:
        """What ``geartrain doctor`` shows of Horovod, and what is missing."""
        return installed.diagnose()

    def lr_factor(self, size: int, rank: int = 0) -> int:
        """What this rank's learning rates are multiplied by in a world of ``size``."""
        workers = size if self.ranks is None else len(self.ranks) if rank in self.ranks else 1
        return workers if self.scale_lr and self.op == "average" else 1

    # --- before anything starts ------------------------------------------------------------------------------------------

    def notes(self, plan: Plan) -> dict[str, str]:
        """What the plan shows of this strategy."""
        size = checks.size_of(plan)
        why = "scale_lr=False" if not self.scale_lr else f"op={self.op!r}"
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
        if self._elastic is not None:  # the same on every rank, whenever it came
            steps = (
                ""
                if self._elastic.every is None
                else f" and after every {self._elastic.every} steps"
            )
            told = {"elastic": f"a commit at the beginning of each epoch{steps}"}
            return told | {
                "learning rates": "× workers, as many as there are (scale_lr)"
                if scales
                else f"as configured ({why})"
            }
        told = {"learning rates": f"{factor} ({'scale_lr' if scales else why}{workers})"}
        return told | (
            {"process set": f"ranks {alone} train alone, at rates as configured"} if alone else {}
        )

    @hookimpl
    def plan_processes(self, request: PlanRequest) -> Layout:
        return Layout(len(request.devices) if launcher() is None else None, 1)

    @hookimpl
    def check_plan(self, plan: Plan, module: Module | type[Module]) -> None:
        checks.check_combination(plan, module, self.op, self.ranks, self.passes)
        if (
            not plan.assumed and self._meeting is None
        ):  # a Session checks again for each of its models, when all this was seen to
            if self._elastic is not None:
                checks.check_elastic(plan.strategy.label)
            checks.check_here(plan, self.op, self.timeline)

    @hookimpl
    def launch(self, run: Run, worker: Callable[[int], Any]) -> Any:
        if self._elastic is not None and run.mode == "session":
            raise UsageError(
                f"{run.plan.strategy.label}: elastic=True needs a Trainer, which calls the loop again. Fix: elastic=False"
            )
        return start(run, worker, self.stall_timeout or _TO_MEET, self._elastic)

    # --- set-up ----------------------------------------------------------------------------------------------------------

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
        passes = (
            self.passes
            if run.plan.options.accumulate_grad_batches == 1
            else run.plan.options.accumulate_grad_batches
        )
        self.wrapped = Wrapped(self.collectives, self.reduction, passes, ranks)
        #: Whether this rank has others to reduce gradients with.
        self._reduces = hvd.size() > 1 and (ranks is None or ranks.included())
        if elastic is not None:
            elastic.agree(
                run, self.collectives
            )  # last: where it fails, teardown_process_group finds all that it ends
        return World(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank())

    @hookimpl
    def make_ranks(self) -> SeveralRanks:
        return SeveralRanks()

    @hookimpl
    def shard_dataloader(self, run: Run, loader: Iterable[Any], stage: str) -> Iterable[Any]:
        return shard(run, loader, stage)

    @hookimpl
    def wrap_model(self, run: Run, model: nn.Module) -> nn.Module:
        model = model.to(run.device)
        if run.world.size > 1:
            state = {
                **model.state_dict(keep_vars=True),
                **dict(model.named_buffers()),
            }  # those that are not persistent, too
            self.collectives.broadcast_tensors(
                {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
            )
        return model

    @hookimpl
    def wrap_optimizer(self, run: Run, optimizer: Optimizer) -> Optimizer:
        if (
            run.needs_closure
            and self._meeting is not None
            and self._meeting.process_set is not None
        ):
            raise UsageError(
                f"{run.plan.strategy.label}: {type(optimizer).__name__} evaluates its closure as often as it likes, and ranks outside of "
                f"process_set={self.ranks} another number of times than those in it. Fix: another optimizer, or no process_set"
            )
        if run.world.size > 1:
            # As an object: broadcast_optimizer_state would take a step with gradients of zero to have a state to send.
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
        """Of a run that goes on: its checkpoint's learning rates, which may be of another number of workers, become those of this one."""
        if run.resumed is None:
            return
        schedulers, factor = (
            [schedule.scheduler for schedule in run.schedulers],
            self.lr_factor(run.world.size, run.world.rank),
        )
        before = {rates.scale(optimizer, schedulers, factor) for optimizer in run.optimizers}
        if before - {factor} and run.world.rank == 0:
            was = ", ".join(f"× {one}" for one in sorted(before))
            warnings.warn(
                f"learning rates of the checkpoint were {was}, and are × {factor} now, as the plan says",
                stacklevel=2,
            )
        if (
            run.world.rank == 0
            and self._meeting is not None
            and self._meeting.process_set is not None
        ):
            warnings.warn(
                f"ranks outside of process_set={self.ranks} go on from rank 0's weights: a checkpoint has no other",
                stacklevel=2,
            )

    @hookimpl
    def on_epoch_start(self, run: Run) -> None:
        if self._elastic is not None:
            self._elastic.commit_epoch(run, self.collectives)

    # --- a step ----------------------------------------------------------------------------------------------------------

    @hookimpl
    def micro_step(self, run: Run, first: bool, last: bool) -> AbstractContextManager[Any]:
        # Gradients stay on this rank until the window's last micro-batch. In manual optimisation and in a Session nobody can tell which
        # backward is the last before a step: there they are sent when the step comes.
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

    # --- collectives -----------------------------------------------------------------------------------------------------

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

    # --- the end ---------------------------------------------------------------------------------------------------------

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
