"""Session: accelerators, strategies, precision and plugins for those who keep their own loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from geartrain import Module, Run, UsageError
from geartrain.plugin_api import (
    STEPS,
    check_ranks_agree,
    count_batches,
    needs_closure,
    parameters_of,
    share_temporary_folder,
    write_instead,
)
from geartrain_session.models import Called, SessionLoader, SessionModel
from geartrain_session.optimizers import StepForwarder, Stepper, session_optimizer, stepper_of
from geartrain_session.together import Together
from geartrain_session.working import Models, as_one_module, attach


class Session(Together):
    """What :class:`geartrain.Trainer` brings along, for people who keep their own loop; names as in Lightning Fabric.

    Everything is checked and planned when it is made; ``session.plan`` shows it. ``with Session(...) as session:`` closes it.

    Args:
        accelerator: as for :class:`geartrain.Trainer`, as are devices, strategy, num_nodes, precision and plugins.
        callbacks: objects whose methods ``session.call(name, ...)`` calls; plugins' objects are plugins.
        seed: seeds Python, NumPy and torch, now and again in each process.
        output: folder for plan.json, metrics.jsonl and summary.json; nothing is written without it.
        gradient_clip_val: the largest gradient norm or value of an optimizer's parameters; ``None`` for no clipping.
        gradient_clip_algorithm: ``"norm"`` or ``"value"``.
        log_every_n_steps: steps between flushes of what plugins log.
        assume: accelerator -> device count, to plan for hardware that is not here; such a session cannot be launched.

    Raises:
        UsageError: anything that cannot work, and plugins that need a Trainer's loop.
    """

    if not TYPE_CHECKING:  # a type checker would take any name for one that is there

        def __getattr__(self, name: str) -> Any:
            """Only for names that are not there: those of Fabric's get what to write instead."""
            try:
                return object.__getattribute__(self, name)  # again, for its error: a property's own among them
            except AttributeError as error:
                raise AttributeError(f"{error}{write_instead('Session', name)}", name=name, obj=self) from None

    # --- setting up ------------------------------------------------------------------------------------------------------

    def setup(self, module: nn.Module, *optimizers: Optimizer) -> Any:
        """Move a model to the device, wrap it for the strategy, and let its optimizers step through the hooks. Once for each model.

        Returns:
            The model, or ``(model, optimizer, ...)``: what the loop is to call and step.

        Raises:
            UsageError: a model that was set up already, or an optimizer of parameters that it does not have.
            TrainingError: the model is not the same on every rank.
        """
        run = self._need("setup")
        if not isinstance(module, nn.Module):
            raise UsageError(f"setup({type(module).__name__}): the first argument is the model. Fix: setup(model, optimizer)")
        if isinstance(module, SessionModel) or any(module is model.module for model in self._models):
            raise UsageError(
                f"this {type(getattr(module, 'module', module)).__name__} is set up already. Fix: setup once, and use what it returned"
            )
        for optimizer in optimizers:
            _check_optimizer(module, optimizer)
        own = self._run_of(module)
        self.hooks.check_plan(plan=self.plan, module=as_one_module(module))
        check_ranks_agree(own)
        own.unwrapped = Called(module)  # type: ignore[assignment]  # plays the part of Step
        own.model = run.hooks.wrap_model(run=own, model=own.unwrapped)
        model = SessionModel(
            self, own, module, [name for name in STEPS if isinstance(module, Module) and callable(getattr(module, name, None))]
        )
        self._models.append(model)
        self._runs.append(own)
        attach(run, self._models)
        made = tuple(self._optimizer(model, optimizer) for optimizer in optimizers)
        return (model, *made) if made else model

    setup_module = setup

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Let optimizers of models that are set up step through the hooks. Returns one, or a tuple."""
        self._need("setup_optimizers")
        made = []
        for optimizer in optimizers:
            if not self._models:
                raise UsageError("setup_optimizers comes before setup of the model. Fix: setup(model, optimizer)")
            model = next((model for model in self._models if _owns(model.module, optimizer)), self._models[-1])
            _check_optimizer(model.module, optimizer)
            made.append(self._optimizer(model, optimizer))
        return made[0] if len(made) == 1 else tuple(made)

    def _optimizer(self, model: SessionModel, optimizer: Optimizer) -> Any:
        run = self._run_of(model.module, model._run)
        run.closure = needs_closure([optimizer])
        run.optimizers = [run.hooks.wrap_optimizer(run=run, optimizer=optimizer)]
        self._runs.append(run)
        return session_optimizer(run.optimizers[0], Stepper(self, run, model))

    def _run_of(self, module: nn.Module, of: Run | None = None) -> Run:
        """The run as hooks see it where they are called for one model, one optimizer or one loader."""
        run = copy.copy(self._need("setup") if of is None else of)
        run.step_functions = {} if of is None else of.step_functions
        run.module = module  # type: ignore[assignment]  # hooks ask it for parameters and submodules, as any nn.Module can tell
        return run

    def setup_dataloaders(self, *loaders: Any, use_distributed_sampler: bool = True, move_to_device: bool = True, even: bool = True) -> Any:
        """This rank's part of each loader, its batches on the device. Each pass is the next epoch of a shuffling sampler.

        Args:
            use_distributed_sampler: let the strategy shard them.
            move_to_device: ``False`` leaves batches where the loader made them.
            even: give each rank equally many samples, some twice; ``False``, for evaluation: each sample once, so that one rank may have
                a batch less than another.

        Returns:
            One, or a list.
        """
        stage, made = "train" if even else "validate", []
        for loader in loaders:
            run = self._run_of(Models())
            if not isinstance(loader, Iterable) or isinstance(loader, SessionLoader | Mapping | str | bytes):
                what = f"setup_dataloaders({type(loader).__name__}) is no loader, or one of this session"
                raise UsageError(f"{what}. Fix: a DataLoader or an iterable of batches, once")
            run.stage = stage
            mine = run.hooks.shard_dataloader(run=run, loader=loader, stage=stage) if use_distributed_sampler else loader
            share_temporary_folder([mine])
            run.loaders, run.batches = {stage: [mine]}, {stage: [count_batches(mine, None, stage)]}
            self._need("setup_dataloaders").loaders.setdefault(stage, []).append(mine)  # their workers end with the session
            made.append(SessionLoader(self, run, mine, move_to_device))
        return made[0] if len(made) == 1 else made

    # --- a step ----------------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients: in place of ``loss.backward()``, which would pass a gradient scaler by."""
        run = self._run or self._need("backward")
        self._backwards += 1
        run.hooks.backward(run=run, loss=loss)

    def step(self, optimizer: Any, closure: Callable[[], Any] | None = None) -> bool:
        """``optimizer.step(closure)``, and whether the step was taken: 16-mixed skips those whose gradients overflowed."""
        optimizer.step(*([] if closure is None else [closure]))
        return stepper_of(optimizer).stepped

    def _stepped(self, run: Run) -> None:
        main = self._run
        assert main is not None
        main.step = done = main.step + 1
        for each in self._runs:
            each.step = done
        if run.hooks.on_step_end is not None:
            run.hooks.on_step_end(run=run)
        if run.should_stop:
            main.should_stop = True
        if done % self._flush_every == 0:
            main.logs.flush()  # the CPU waits for the GPU here, where a plugin has logged a tensor

    def clip_gradients(
        self,
        module: nn.Module,
        optimizer: Any,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor | None:
        """Clip the gradients of a model that this optimizer steps, reduced and unscaled, between the last ``backward`` and the step.

        Args:
            clip_val: the largest value of a gradient; either this or ``max_norm``.
            max_norm: the largest norm of all of them.

        Returns:
            The norm before clipping, where ``max_norm`` is given.
        """
        if (clip_val is None) == (max_norm is None):
            raise UsageError("clip_gradients takes either clip_val= or max_norm=. Fix: give one of them")
        stepper_of(optimizer).reduce()
        stepped = set(parameters_of([optimizer]))  # those of another may be scaled still, or not reduced
        parameters = [parameter for parameter in module.parameters() if parameter in stepped]
        if max_norm is not None:
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
        torch.nn.utils.clip_grad_value_(parameters, clip_val)  # type: ignore[arg-type]
        return None

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> Iterator[None]:
        """Keep gradients on this rank: around forward and backward of all micro-batches but a step's last."""
        if not isinstance(module, SessionModel):
            raise UsageError(f"no_backward_sync({type(module).__name__}): Fix: give the model that session.setup returned")
        if not enabled:
            yield
            return
        calls, run = module._calls, module._run
        micro_step = run.hooks.micro_step
        before, calls.held = calls.held, True
        try:
            with nullcontext() if micro_step is None else micro_step(run=run, first=False, last=False):
                yield
        finally:
            calls.held = before

    def autocast(self) -> AbstractContextManager[Any]:
        """What the precision puts around a model's forward, for what is computed outside of one."""
        self._need("autocast")
        computes = next((part.plugin for part in self._parts if part.info.kind == "precision" and hasattr(part.plugin, "computing")), None)
        context: AbstractContextManager[Any] = nullcontext() if computes is None else computes.computing()
        return context

    def to_device(self, batch: Any) -> Any:
        """A batch, or a module, on the device; batches as those of a loader that was set up: in the precision's type."""
        run = self._need("to_device")
        if isinstance(batch, nn.Module):
            return batch.to(run.device)
        if self._mover is None:
            self._mover = self._run_of(Models())
            self._mover.batches = {"train": [1]}
        return next(iter(run.hooks.device_batches(run=self._mover, loader=[batch], stage="train")))


def _owns(module: nn.Module, optimizer: Optimizer) -> bool:
    """Whether all that an optimizer steps is the model's."""
    own = {id(parameter) for parameter in module.parameters()}
    return all(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])


def _check_optimizer(module: nn.Module, optimizer: Any) -> None:
    name = type(module).__name__
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"setup({name}, {type(optimizer).__name__}): what follows the model are its optimizers, one by one")
    if isinstance(type(optimizer).__dict__.get("step"), StepForwarder):
        raise UsageError(f"this {type(optimizer).__name__} is set up already. Fix: setup once, and use what it returned")
    if not _owns(module, optimizer):
        raise UsageError(
            f"{type(optimizer).__name__} steps parameters that {name} does not have. Fix: make it from model.parameters(); "
            "one optimizer of several models takes nn.ModuleList([a, b])"
        )
