"""One run of a Session: its models, optimizers and loaders, and its steps."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from geartrain import Module, Run, UsageError, seed_everything
from geartrain.plugin_api import Stage
from geartrain_session.collectives import mean_of_metrics
from geartrain_session.loaders import SessionLoader
from geartrain_session.models import (
    Called,
    Models,
    SessionModel,
    as_one_module,
    attach,
    hyperparameters_of,
)
from geartrain_session.optimizers import Stepper, check_optimizer, owns, session_optimizer

if TYPE_CHECKING:
    from geartrain_session.session import Session

#: The methods of a module that a loop may call with batches.
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class SessionRun:
    """The state of a Session from launch to close.

    It has the run that hooks see, and a copy of it per model, optimizer and loader.

    Args:
        run: the new run of this process; ``run.trainer`` is the session.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.session = cast("Session", run.trainer)
        self.models: list[SessionModel] = []
        #: Number of calls of ``session.backward``.
        self.backwards = 0
        #: The runs of models and of optimizers.
        self._runs: list[Run] = []
        #: A run that moves batches without a loader.
        self._mover: Run | None = None
        self._has_begun, self._flush_every = False, run.plan.options.log_every_n_steps

    # --- start and end ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Fire ``on_run_start`` before the first batch, step or metric; later calls do nothing."""
        if self._has_begun:
            return
        self._has_begun, run = True, self.run
        self.session.plan = plan = replace(
            run.plan, hyperparameters=hyperparameters_of(self.models)
        )
        for each in (run, *self._runs):
            each.plan = plan
        seed = plan.options.seed
        if seed is not None and run.world.rank:
            # The weights are the same on every rank, but dropout must differ.
            seed_everything(seed + run.world.rank)
        run.hooks.on_run_start(run=run)

    def finish(self) -> None:
        """Report the metrics that plugins logged, after a run without an error."""
        self.begin()
        run = self.run
        run.logs.end_epoch()
        run.hooks.on_run_end(run=run)
        run.hooks.barrier(run=run)

    def release_models(self, run: Run) -> None:
        """Release the models from their wrappers, which must go before the process group.

        See :meth:`geartrain.Run.torn_down`.
        """
        for model in self.models:
            if isinstance(model.module, Module):
                model.module._attach(None)
        for each in (run, *self._runs):
            each.model, each.loop.step_functions, each.optimizers = None, {}, []
        run.module = Models()

    # --- set-up -----------------------------------------------------------------------------------

    def setup(self, module: nn.Module, optimizers: Iterable[Optimizer]) -> tuple[Any, ...]:
        """Return the model and its optimizers for the loop; see :meth:`Session.setup`."""
        if not isinstance(module, nn.Module):
            raise UsageError(
                f"setup({type(module).__name__}): the first argument is no model. "
                "Fix: setup(model, optimizer)"
            )
        if isinstance(module, SessionModel) or any(module is model.module for model in self.models):
            name = type(getattr(module, "module", module)).__name__
            raise UsageError(
                f"this {name} is already set up. Fix: call setup once, and use its result"
            )
        for optimizer in optimizers:
            check_optimizer(module, optimizer)
        model_run = self._run_of(self.run, module)
        self.session.hooks.check_plan(plan=self.session.plan, module=as_one_module(module))
        model_run.coordinator.check(model_run)
        model_run.loop.unwrapped = Called(module)  # type: ignore[assignment]  # in place of a StepForwarder
        model_run.model = model_run.hooks.wrap_model(run=model_run, model=model_run.loop.unwrapped)
        methods = [
            name
            for name in _STEPS
            if isinstance(module, Module) and callable(getattr(module, name, None))
        ]
        model = SessionModel(self, model_run, module, methods)
        self.models.append(model)
        self._runs.append(model_run)
        attach(self.run, self.models)
        return (model, *(self._optimizer(model, optimizer) for optimizer in optimizers))

    def setup_optimizer(self, optimizer: Optimizer) -> Any:
        """Return an optimizer for the loop; see :meth:`Session.setup_optimizers`."""
        if not self.models:
            raise UsageError(
                "setup_optimizers comes before setup of the model. Fix: setup(model, optimizer)"
            )
        model = next(
            (model for model in self.models if owns(model.module, optimizer)), self.models[-1]
        )
        check_optimizer(model.module, optimizer)
        return self._optimizer(model, optimizer)

    def setup_dataloader(self, loader: Any, stage: str, shard: bool, move: bool) -> SessionLoader:
        """Return a loader of this rank's batches; see :meth:`Session.setup_dataloaders`."""
        if not isinstance(loader, Iterable) or isinstance(
            loader, SessionLoader | Mapping | str | bytes
        ):
            raise UsageError(
                f"setup_dataloaders({type(loader).__name__}): the argument is no loader, or is "
                "already set up. Fix: give a DataLoader or an iterable of batches, once"
            )
        run = self._run_of(self.run, Models())
        run.stage = stage
        each_loader = getattr(loader, "each_loader", None)  # of a CombinedLoader
        if each_loader and getattr(loader, "mode", None) == "sequential":
            message = "setup_dataloaders: a CombinedLoader with mode='sequential'"
            raise UsageError(f"{message} is not iterated. Fix: set up each of its loaders")
        part = partial(_part_of_this_rank, run, stage)
        sharded = (each_loader(part) if each_loader else part(loader)) if shard else loader
        run.stages = {stage: Stage.of([sharded], stage)}
        self.run.stages[stage].loaders.append(sharded)  # the loader's workers end with the session
        # A strategy that shards a loader talks to all ranks then; others may be set up on one rank.
        counts = _unequal_counts(run, stage) if stage != "train" and sharded is not loader else []
        return SessionLoader(self, run, sharded, move, counts)

    def _optimizer(self, model: SessionModel, optimizer: Optimizer) -> Any:
        run = self._run_of(model._run, model.module)
        run.loop.step_functions = model._run.loop.step_functions
        run.wrap_optimizers([optimizer])
        self._runs.append(run)
        return session_optimizer(run.optimizers[0], Stepper(self, run, model))

    @staticmethod
    def _run_of(run: Run, module: nn.Module) -> Run:
        """Return a copy of a run, for the hooks of one model, one optimizer or one loader."""
        model_run = copy.copy(run)
        model_run.loop.step_functions = {}
        model_run.module = module  # type: ignore[assignment]  # hooks need only nn.Module's attributes
        return model_run

    # --- a step -----------------------------------------------------------------------------------

    def stepped(self, run: Run) -> None:
        """Count a step of the optimizer of ``run``, and flush metrics if they are due."""
        main = self.run
        main.step = done = main.step + 1
        for each in self._runs:
            each.step = done
        run.hooks.on_step_end(run=run)
        if run.should_stop:
            main.should_stop = True
        if done % self._flush_every == 0:
            main.logs.flush()  # if a plugin logged a tensor, the CPU waits for the GPU here

    def on_device(self, batch: Any) -> Any:
        """Return a batch on the device, in the precision's type."""
        if self._mover is None:
            self._mover = self._run_of(self.run, Models())
            self._mover.stages = {"train": Stage(batches=[1])}
        return next(
            iter(self.run.hooks.device_batches(run=self._mover, loader=[batch], stage="train"))
        )

    def log(self, metrics: Mapping[str, Any], step: int | None, sync_dist: bool) -> None:
        """Send numbers to the loggers; see :meth:`Session.log_dict`."""
        self.begin()
        run = self.run
        values: Mapping[str, float] = run.logs.numbers(metrics)
        if sync_dist:
            values = mean_of_metrics(run, values)
        run.loop.reported.update(values)
        run.logs.logged.update(values)
        if run.world.rank == 0:
            run.hooks.log_metrics(run=run, metrics=values, step=run.step if step is None else step)


def _unequal_counts(run: Run, stage: str) -> list[int]:
    """Return each rank's number of batches of a sharded loader, if they are known and differ."""
    (count,) = run.stages[stage].batches
    local = torch.tensor([-1 if count is None else count], dtype=torch.float64)
    counts = [int(n) for n in run.hooks.log_sync(run=run, values=local)[:, 0]]
    return counts if min(counts) >= 0 and len(set(counts)) > 1 else []


def _part_of_this_rank(run: Run, stage: str, loader: Any) -> Any:
    return run.hooks.shard_dataloader(run=run, loader=loader, stage=stage)
