"""Session: accelerators, strategies, precision and plugins for users who write their own loop."""

from __future__ import annotations

import atexit
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import nn
from torch.optim import Optimizer

from geartrain import Run, UsageError, seed_everything
from geartrain.plugin_api import (
    Hooks,
    TrainerBase,
    parameters_of,
    user_path,
    write_instead,
)
from geartrain_session import collectives, state as states
from geartrain_session.arguments import check_hooks, refuse_unknown
from geartrain_session.callbacks import Callbacks
from geartrain_session.models import Models, SessionModel
from geartrain_session.optimizers import stepper_of
from geartrain_session.session_run import SessionRun
from geartrain_session.workers import FunctionWorker, ScriptWorker


class Session(TrainerBase):
    """The features of :class:`geartrain.Trainer` for a loop that the user writes.

    Names are as in Lightning Fabric. The constructor checks and plans everything; ``session.plan``
    shows the plan. ``with Session(...) as session:`` closes the session at the end.

    Args:
        accelerator: as for :class:`geartrain.Trainer`; also strategy, devices, num_nodes, precision
            and plugins.
        callbacks: objects whose methods ``session.call(name, ...)`` calls. Objects with
            ``@hookimpl`` methods become plugins.
        seed: seeds Python, NumPy and torch, now and again in each process.
        output: folder for plan.json, metrics.jsonl and summary.json; ``None`` writes no file.
        gradient_clip_val: the largest gradient norm or value of an optimizer's parameters; ``None``
            for no clipping.
        gradient_clip_algorithm: ``"norm"`` or ``"value"``.
        log_every_n_steps: steps between flushes of the metrics that plugins log.
        block: as for :class:`geartrain.Trainer`; also accelerator_options, strategy_options and
            plugin_options.
        assume: accelerator -> device count, to plan for hardware that this machine lacks. Such a
            session cannot be launched.

    Raises:
        UsageError: the arguments cannot work, or a plugin needs a Trainer's loop.
    """

    datamodule = None  # as in a Trainer: strategies that start new processes read it
    _run: Run | None
    _session_run: SessionRun | None
    #: The contexts that :meth:`close` ends, after :meth:`launch` without a function.
    _stack: ExitStack | None

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
        refuse_unknown(
            unknown, [name for name in inspect.signature(Session).parameters if name != "unknown"]
        )
        arguments = dict(locals())
        given = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
        hook_plugins = [
            callback
            for callback in given
            if any(
                hasattr(getattr(callback, name, None), "geartrain_impl") for name in dir(callback)
            )
        ]
        #: The callbacks that are not plugins; :meth:`call` calls them.
        self.callbacks = Callbacks(
            callback for callback in given if not any(callback is plugin for plugin in hook_plugins)
        )
        super().__init__(
            arguments
            | {"callbacks": hook_plugins, "max_epochs": -1}
            | {"num_sanity_val_steps": 0, "enable_progress_bar": False}
        )
        if seed is not None:
            seed_everything(seed)
        check_hooks(self.hooks, self._setup.parts)
        self._setup.check(self.hooks, Models)
        self._forget_run()

    if not TYPE_CHECKING:  # a type checker would accept any name

        def __getattr__(self, name: str) -> Any:
            """Raise for a name that does not exist; for a Fabric name, give the replacement."""
            try:  # again, for its error: a property may have raised it
                return object.__getattribute__(self, name)
            except AttributeError as error:
                raise AttributeError(
                    f"{error}{write_instead('Session', name)}", name=name, obj=self
                ) from None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state from which a new process creates this session."""
        return {"_setup": self._setup, "callbacks": self.callbacks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, hooks=Hooks(state["_setup"].parts))
        self._forget_run()

    # --- start and end ----------------------------------------------------------------------------

    def launch(
        self, function: Callable[..., Any] | None = None, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Start, or join, the processes of the plan.

        Without a function, every rank runs the rest of the script: a strategy that runs the same
        command again (ddp) makes this process one of the ranks. With a function,
        ``function(session, *args, **kwargs)`` runs in every process, and the session closes after
        it. Under ddp_spawn, its changes stay in those processes.

        Args:
            function: the loop; ``None``: the rest of the script.
            args: its positional arguments.
            kwargs: its keyword arguments.

        Returns:
            The function's result on rank 0.

        Raises:
            UsageError: the session is already launched, or the strategy needs a function.
        """
        if self._run is not None:
            raise UsageError(
                "this session is already launched. "
                "Fix: launch once; call session.close() before another launch"
            )
        if function is not None and not callable(function):
            raise UsageError(
                f"launch({function!r}): the argument is no function. "
                "Fix: session.launch(train), which calls train(session)"
            )
        strategy = next(part for part in self._setup.parts if part.info.kind == "strategy")
        if function is None and getattr(strategy.plugin, "needs_function", False):
            raise UsageError(
                f"{strategy.info.label} starts its processes on a function. "
                "Fix: session.launch(train), which calls train(session)"
            )
        run = Run(
            plan=self.plan,
            hooks=Hooks(self._setup.parts),
            module=Models(),
            trainer=cast(Any, self),  # launchers and hooks read some attributes of a Trainer
            command="fit",
            cluster=self.cluster,
            output=self.plan.output,
            mode="session",
        )
        try:
            with ExitStack() as around:
                around.enter_context(self._setup.reserved_folder())
                if function is not None:
                    return run.hooks.launch(
                        run=run, worker=FunctionWorker(run, function, args, kwargs)
                    )
                worker = ScriptWorker(run)
                run.hooks.launch(run=run, worker=worker)
                around.push(worker.stack())
                self._stack = around.pop_all()
            atexit.register(self._at_exit)
        finally:
            if self._stack is None:
                self._forget_run()

    def close(self) -> None:
        """End the run: flush metrics, close loggers, release the process group and the device.

        Models stay usable in this process. A second call does nothing.
        """
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
            self._forget_run()

    def _at_exit(self) -> None:
        self._close(getattr(sys, "last_value", None))

    def _forget_run(self) -> None:
        self._run, self._session_run, self._stack = None, None, None

    def attach_run(self, session_run: SessionRun) -> None:
        """Set the run that a worker has set up in this process."""
        self._run, self._session_run = session_run.run, session_run

    def _launched(self, what: str) -> SessionRun:
        """Return the run; launch it first if it has one process.

        Raises:
            UsageError: the plan has several processes, which are not launched.
        """
        if self._session_run is None:
            if self.plan.processes != 1:
                raise UsageError(
                    f"{what} comes before session.launch(), and {self.plan.strategy.label} has "
                    f"{self.plan.processes or 'several'} processes. "
                    "Fix: first call session.launch() or session.launch(train)"
                )
            self.launch()
        assert self._session_run is not None
        return self._session_run

    # --- set-up -----------------------------------------------------------------------------------

    def setup(self, module: nn.Module, *optimizers: Optimizer) -> Any:
        """Move a model to the device and wrap it for the strategy; its optimizers run the hooks.

        Call it once per model.

        Args:
            module: the model.
            optimizers: its optimizers.

        Returns:
            The model, or ``(model, optimizer, ...)``: the loop calls and steps these objects.

        Raises:
            UsageError: the model is already set up, or an optimizer steps other parameters.
            TrainingError: the model is not the same on every rank.
        """
        made = self._launched("setup").setup(module, optimizers)
        return made if optimizers else made[0]

    setup_module = setup

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Set up optimizers whose models are already set up. Return one optimizer, or a tuple."""
        session_run = self._launched("setup_optimizers")
        made = tuple(session_run.setup_optimizer(optimizer) for optimizer in optimizers)
        return made[0] if len(made) == 1 else made

    def setup_dataloaders(
        self,
        *loaders: Any,
        use_distributed_sampler: bool = True,
        move_to_device: bool = True,
        even: bool = True,
    ) -> Any:
        """Shard each loader over ranks and move its batches to the device.

        Each pass over a loader is the next epoch of a shuffling sampler.

        Args:
            loaders: DataLoaders, or iterables of batches.
            use_distributed_sampler: the strategy shards the loaders.
            move_to_device: ``False`` leaves batches on the device where the loader created them.
            even: ``True``: every rank has the same number of samples, some twice. ``False``, for
                evaluation: every sample once, so a rank may have a batch less than another.

        Returns:
            One loader, or a list.
        """
        session_run, stage = self._launched("setup_dataloaders"), "train" if even else "validate"
        made = [
            session_run.setup_dataloader(loader, stage, use_distributed_sampler, move_to_device)
            for loader in loaders
        ]
        return made[0] if len(made) == 1 else made

    # --- a step -----------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients. Use it instead of ``loss.backward()``, which bypasses the scaler."""
        session_run = self._session_run or self._launched("backward")
        session_run.backwards += 1
        session_run.run.hooks.backward(run=session_run.run, loss=loss)

    def step(self, optimizer: Any, closure: Callable[[], Any] | None = None) -> bool:
        """Call ``optimizer.step(closure)``. Return False if 16-mixed skips it after an overflow."""
        optimizer.step(*([] if closure is None else [closure]))
        return stepper_of(optimizer).stepped

    def clip_gradients(
        self,
        module: nn.Module,
        optimizer: Any,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor | None:
        """Clip the gradients that this optimizer steps, after reducing and unscaling them.

        Call it between the last ``backward`` and the step.

        Args:
            module: the model; only its parameters are clipped.
            optimizer: only parameters of this optimizer are clipped.
            clip_val: the largest value of a gradient; either this or ``max_norm``.
            max_norm: the largest norm of all gradients.
            norm_type: the norm, as in ``torch.nn.utils.clip_grad_norm_``.
            error_if_nonfinite: raise if the norm is NaN or infinite.

        Returns:
            The norm before clipping, if ``max_norm`` is given.

        Raises:
            UsageError: both limits or none are given, or the optimizer was not set up.
        """
        if (clip_val is None) == (max_norm is None):
            raise UsageError("clip_gradients takes either clip_val= or max_norm=. Fix: give one")
        stepper_of(optimizer).reduce()
        # Gradients of another optimizer may still be scaled, or not reduced.
        stepped = set(parameters_of([optimizer]))
        parameters = [parameter for parameter in module.parameters() if parameter in stepped]
        if max_norm is not None:
            return torch.nn.utils.clip_grad_norm_(
                parameters, max_norm, norm_type, error_if_nonfinite
            )
        torch.nn.utils.clip_grad_value_(parameters, clip_val)  # type: ignore[arg-type]
        return None

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> Iterator[None]:
        """Keep gradients on this rank inside the block.

        Put it around forward and backward of all micro-batches of a step but the last.
        """
        if not isinstance(module, SessionModel):
            raise UsageError(
                f"no_backward_sync({type(module).__name__}): the argument was not set up. "
                "Fix: give the model that session.setup returned"
            )
        if not enabled:
            yield
            return
        calls, run = module._calls, module._run
        before, calls.held = calls.held, True
        try:
            with run.hooks.micro_step(run=run, first=False, last=False):
                yield
        finally:
            calls.held = before

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the precision's context of a model's forward, for computations outside of it."""
        self._launched("autocast")
        computes = next(
            (
                part.plugin
                for part in self._setup.parts
                if part.info.kind == "precision" and hasattr(part.plugin, "computing")
            ),
            None,
        )
        context: AbstractContextManager[Any] = (
            nullcontext() if computes is None else computes.computing()
        )
        return context

    def to_device(self, batch: Any) -> Any:
        """Move a batch or a module to the device; a batch also gets the precision's type."""
        session_run = self._launched("to_device")
        return (
            batch.to(session_run.run.device)
            if isinstance(batch, nn.Module)
            else session_run.on_device(batch)
        )

    # --- the other ranks --------------------------------------------------------------------------

    def all_gather(self, data: Any, sync_grads: bool = False) -> Any:
        """Gather each tensor and number of ``data`` from every rank.

        Args:
            data: nested data; a number becomes a tensor on the device.
            sync_grads: as for :meth:`geartrain.Module.all_gather`.

        Returns:
            ``data`` with ``[world_size, *shape]`` per tensor, or a list if first dimensions differ.

        Raises:
            TrainingError: ranks bring different numbers of tensors.
        """
        run = self._launched("all_gather").run
        return run.coordinator.gather(run, data, sync_grads)

    def all_reduce(self, data: Any, reduce_op: str = "mean") -> Any:
        """Reduce each tensor and number of ``data`` over ranks; the result has no gradients.

        Args:
            data: nested data; each tensor has the same shape on all ranks. A number becomes a
                tensor on the device.
            reduce_op: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``.

        Raises:
            TrainingError: ranks bring different numbers of tensors, or other shapes.
        """
        return collectives.all_reduce(self._launched("all_reduce").run, data, reduce_op)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank ``src``'s object on every rank."""
        run = self._launched("broadcast").run
        return run.hooks.broadcast(run=run, obj=obj, src=src)

    def barrier(self) -> None:
        """Wait until every rank calls it."""
        run = self._launched("barrier").run
        run.hooks.barrier(run=run)

    @contextmanager
    def rank_zero_first(self, local: bool = False) -> Iterator[None]:
        """Run the block on rank 0 (``local``: of each node) before the others, e.g. a download."""
        first = (self.local_rank if local else self.global_rank) == 0
        if not first:
            self.barrier()
        yield
        if first:
            self.barrier()

    # --- output -----------------------------------------------------------------------------------

    def log(self, name: str, value: Any, step: int | None = None, sync_dist: bool = False) -> None:
        """Send one number to the loggers and metrics.jsonl now; a GPU tensor makes the CPU wait."""
        self.log_dict({name: value}, step, sync_dist)

    def log_dict(
        self, metrics: Mapping[str, Any], step: int | None = None, sync_dist: bool = False
    ) -> None:
        """Send numbers to the loggers and metrics.jsonl now.

        Args:
            metrics: numbers, or tensors of one element, by name.
            step: the step of the numbers; default: the number of optimizer steps.
            sync_dist: log the mean over ranks; all ranks must call this with the same names.
                Otherwise the numbers of rank 0 are logged.

        Raises:
            TrainingError: a value is no number, or ranks log different names with ``sync_dist``.
        """
        self._launched("log").log(metrics, step, sync_dist)

    def save(self, path: str | Path, state: Mapping[str, Any]) -> None:
        """Write a checkpoint atomically. Every rank calls it.

        Args:
            path: the file.
            state: models, optimizers, other objects with ``state_dict()``, plain values and
                tensors, by name.

        Raises:
            UsageError: ``state`` has another object, which :meth:`load` could not read.
        """
        run = self._launched("save").run
        run.save_checkpoint(states.collect(state), user_path(path, "path"))

    def load(
        self, path: str | Path, state: dict[str, Any] | None = None, strict: bool = True
    ) -> dict[str, Any]:
        """Load a checkpoint into the models and optimizers of ``state``; replace its plain values.

        Args:
            path: the file.
            state: objects by name, as for :meth:`save`; default: load no object and return all.
            strict: raise if the file lacks a name of ``state``; models are always strict.

        Returns:
            The rest of the file.

        Raises:
            UsageError: the file does not exist.
            TrainingError: the file is damaged, is no checkpoint, lacks a name or does not fit.
        """
        run, path = self._launched("load").run, user_path(path, "path")
        found = run.hooks.load_checkpoint(run=run, path=path)
        return states.apply(path, found, {} if state is None else state, strict)

    def call(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Call the method ``name`` of every callback that has it."""
        self.callbacks.call(name, args, kwargs)

    def print(self, *values: Any, **options: Any) -> None:
        """Call ``print`` on rank 0 only."""
        if self.is_global_zero:
            print(*values, **options)

    def seed_everything(self, seed: int) -> int:
        """Seed Python, NumPy and torch with the same seed on every rank. Return the seed."""
        return seed_everything(seed)

    # --- properties -------------------------------------------------------------------------------

    @property
    def run(self) -> Run:
        """The run, as hooks see it."""
        return self._launched("run").run

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._launched("device").run.device

    @property
    def node_rank(self) -> int:
        return (
            self._run.world.node_rank
            if self._run
            else self.cluster.node_rank
            if self.cluster
            else 0
        )

    @property
    def global_step(self) -> int:
        """Number of steps of all optimizers."""
        return self._run.step if self._run else 0

    @property
    def should_stop(self) -> bool:
        """True after a plugin asked the loop to end; the same on all ranks.

        It changes at the flush (every ``log_every_n_steps``) after the request.
        """
        return bool(self._run and self._run.logs.stop)
