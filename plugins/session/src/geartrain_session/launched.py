"""The beginning and the end of a Session: planning, processes, teardown."""

from __future__ import annotations

import atexit
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, cast

import torch

from geartrain import Run, Trainer, UsageError, seed_everything
from geartrain.plugin_api import (
    Hooks,
    Options,
    RankProperties,
    Registry,
    TrainerArguments,
    build_components,
    check_joins,
    complete,
    core_parts,
    detect,
    fire,
    nearest,
    pickled_plugins,
    reserved_folder,
    restore_plugins,
)
from geartrain_session.models import SessionModel
from geartrain_session.working import FunctionWorker, Models, ScriptWorker, check_hooks, hyperparameters_of, release_models


class Launched(RankProperties):
    """What a Session is before the loop: see there for the arguments."""

    datamodule = None  # a Trainer's; strategies that hand a run over ask for it

    def __init__(
        self,
        accelerator: str | Any = "auto",
        strategy: str | Any = "auto",
        devices: int | str | Sequence[int] = "auto",
        num_nodes: int = 1,
        precision: str | int = "32-true",
        plugins: Any = (),
        callbacks: Any = (),
        *,
        seed: int | None = None,
        output: str | Path | None = None,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str = "norm",
        log_every_n_steps: int = 50,
        block: Sequence[str] = (),
        accelerator_options: Mapping[str, Any] | None = None,
        strategy_options: Mapping[str, Any] | None = None,
        plugin_options: Mapping[str, Mapping[str, Any]] | None = None,
        assume: Mapping[str, int] | None = None,
        **unknown: Any,
    ) -> None:
        _refuse(unknown)
        options = Options(
            max_epochs=-1,
            max_steps=-1,
            limit_train_batches=None,
            limit_val_batches=None,
            limit_test_batches=None,
            limit_predict_batches=None,
            val_check_interval=1.0,
            check_val_every_n_epoch=1,
            num_sanity_val_steps=0,
            accumulate_grad_batches=1,
            gradient_clip_val=gradient_clip_val,
            gradient_clip_algorithm=gradient_clip_algorithm,
            log_every_n_steps=log_every_n_steps,
            enable_progress_bar=False,
            use_distributed_sampler=True,
            fast_dev_run=0,
            seed=seed,
            deterministic=False,
        )
        if seed is not None:
            seed_everything(seed)
        self._assume = dict(assume or {})
        self._block, self.registry, self.cluster = list(block), Registry(block), detect()
        given = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
        own = [one for one in given if any(hasattr(getattr(one, name, None), "geartrain_impl") for name in dir(one))]
        self._callbacks = [one for one in given if not any(one is plugin for plugin in own)]
        self._called = False
        asked = TrainerArguments(
            accelerator=accelerator,
            devices=devices,
            strategy=strategy,
            num_nodes=num_nodes,
            precision=precision,
            plugins=plugins,
            callbacks=own,
            max_time=None,
            output=output,
            accelerator_options=accelerator_options,
            strategy_options=strategy_options,
            plugin_options=plugin_options,
            assume=self._assume,
        )
        self._parts, self.hooks, self.plan = build_components(self.registry, self.cluster, options, asked)
        check_hooks(self.hooks, self._parts)
        check_joins(self.plan, self.hooks)
        self.hooks.check_plan(plan=self.plan, module=Models)
        self._forget()

    def _forget(self) -> None:
        """Be as before a launch."""
        self._run: Run | None = None
        self._stack: ExitStack | None = None
        self._models: list[SessionModel] = []
        #: The runs of models and of optimizers, and one that moves batches which no loader brings.
        self._runs: list[Run] = []
        self._mover: Run | None = None
        self._backwards, self._begun, self._flush_every = 0, False, self.plan.options.log_every_n_steps

    def __getstate__(self) -> dict[str, Any]:
        """What a fresh process needs to make this session again."""
        kept = ("_block", "_assume", "plan", "_callbacks")
        return {name: getattr(self, name) for name in kept} | {"recipes": pickled_plugins(self._parts)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        made = state.pop("recipes")
        vars(self).update(state, registry=Registry(state["_block"]), cluster=detect(), _called=True)
        plan = self.plan
        self._parts = (*core_parts(plan.options, plan.output, False), *restore_plugins(self.registry, made))
        self.hooks = Hooks(self._parts)
        self._forget()

    def hooks_for(self, model: Any, command: str) -> Hooks:
        """Return the hooks of one run, as :meth:`geartrain.Trainer.hooks_for` does."""
        return Hooks(self._parts)

    # --- beginning and end -----------------------------------------------------------------------------------------------

    def launch(self, function: Callable[..., Any] | None = None, /, *args: Any, **kwargs: Any) -> Any:
        """Start, or join, the processes of the plan.

        Without a function, a strategy that runs the same command again (ddp) makes this process one of the ranks: the script goes on in
        each. With one, ``function(session, *args, **kwargs)`` runs in every process, and the session is closed after it; under
        ddp_spawn, what it changed stays there.

        Returns:
            What the function returned on rank 0.

        Raises:
            UsageError: launched already, or a strategy that starts its processes on a function is given none.
        """
        if self._assume:
            raise UsageError(f"this session assumes hardware that is not here ({self._assume}): session.plan explains it, it cannot run.")
        if self._run is not None:
            raise UsageError("this session is launched already. Fix: launch once; session.close() comes before another launch")
        if function is not None and not callable(function):
            raise UsageError(f"launch({function!r}): it is no function. Fix: session.launch(train), and then train(session)")
        strategy = next(part for part in self._parts if part.info.kind == "strategy")
        if function is None and getattr(strategy.plugin, "needs_function", False):
            raise UsageError(
                f"{strategy.info.label} starts its processes on a function. Fix: session.launch(train), and then train(session)"
            )
        run = Run(
            plan=self.plan,
            hooks=Hooks(self._parts),
            module=Models(),
            trainer=cast(Any, self),  # whose part it plays for those who hand a run over
            command="fit",
            cluster=self.cluster,
            output=self.plan.output,
            own_loop=True,
        )
        try:
            with ExitStack() as around:
                around.enter_context(reserved_folder(self._parts))
                if function is not None:
                    return run.hooks.launch(run=run, worker=FunctionWorker(run, function, args, kwargs))
                stay = ScriptWorker(run)
                run.hooks.launch(run=run, worker=stay)
                around.push(stay.stack())
                self._stack = around.pop_all()
            atexit.register(self._at_exit)
        finally:
            if self._stack is None:
                self._forget()

    def close(self) -> None:
        """End the run: what is logged is flushed, loggers are closed, the process group and the device are let go of. Models stay usable,
        on this process alone. Called twice, it does nothing."""
        self._close(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        stack, self._stack = self._stack, None
        if stack is None:
            return
        atexit.unregister(self._at_exit)
        try:
            if error is None:
                stack.close()
            else:
                stack.__exit__(type(error), error, error.__traceback__)
        finally:
            self._forget()

    def _at_exit(self) -> None:
        self._close(getattr(sys, "last_value", None))

    def _begin(self) -> None:
        """The first batch comes next."""
        run = self._need("this")
        self._begun = True
        self.plan = complete(run.plan, None, hyperparameters_of(self._models))
        for each in (run, *self._runs):
            each.plan = self.plan
        seed = run.plan.options.seed
        if seed is not None and run.world.rank:
            seed_everything(seed + run.world.rank)  # the same weights on every rank, but not the same dropout
        fire(run.hooks.on_run_start, run=run)

    def _finish(self) -> None:
        """The run succeeded: report what plugins logged."""
        run = self._need("close")
        if not self._begun:
            self._begin()
        run.logs.end_epoch()
        fire(run.hooks.on_run_end, run=run)
        run.hooks.barrier(run=run)
        if self._callbacks and not self._called:
            warnings.warn("no method of this session's callbacks was called. Fix: session.call(NAME, ...) where they are due", stacklevel=2)

    def _let_go(self, run: Run) -> None:
        release_models(run, self._runs, self._models)

    def _need(self, what: str) -> Run:
        """The run; one process launches by itself.

        Raises:
            UsageError: several processes that were not launched.
        """
        if self._run is None:
            if self.plan.processes != 1:
                raise UsageError(
                    f"{what} comes before session.launch(), and {self.plan.strategy.label} has {self.plan.processes or 'several'} "
                    "processes. Fix: session.launch(), or session.launch(train), first"
                )
            self.launch()
        assert self._run is not None
        return self._run

    # --- what one asks a session -----------------------------------------------------------------------------------------

    @property
    def run(self) -> Run:
        """The running run, as hooks see it."""
        return self._need("run")

    @property
    def device(self) -> torch.device:
        """This process's."""
        return self._need("device").device

    @property
    def node_rank(self) -> int:
        return self._run.world.node_rank if self._run else self.cluster.node_rank if self.cluster else 0

    @property
    def global_step(self) -> int:
        """Optimizer steps done, of all optimizers."""
        return self._run.step if self._run else 0

    @property
    def should_stop(self) -> bool:
        """Whether a plugin wants the loop to end; the same on all ranks, from the flush (``log_every_n_steps``) that follows."""
        return bool(self._run and self._run.logs.stop)


def _refuse(unknown: Mapping[str, Any]) -> None:
    """Answer an argument that Session does not have with what to do.

    Raises:
        UsageError: there is one.
    """
    for name in unknown:
        if name in ("loggers", "logger"):
            raise UsageError(f"Session has no argument {name!r}. Write: plugins=[...]")
        if name in inspect.signature(Trainer).parameters:
            raise UsageError(f"Session has no argument {name!r}, which belongs to a Trainer's loop: write it in your own")
        known = [known for known in inspect.signature(Launched).parameters if known != "unknown"]
        raise UsageError(f"Session has no argument {name!r}. {nearest(name, known)}")
