"""Manual optimisation: ``training_step`` calls backward and the optimizers itself.

The module sets ``automatic_optimization = False``. A training needs this unless each step has one
loss, one backward and one step of every optimizer. ``training_step`` is called without the
strategy's wrapper, because the wrapper's backward would wait for parameters that a loss does not
use. ``self.manual_backward`` averages gradients over ranks instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import wraps
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from geartrain import Module, Plan, Run, TrainingError, UsageError, hookimpl
from geartrain.plugin_api import LoadedPlugin, parameters_of, warn
from geartrain_callbacks.manual.clipping import check_clip, clip
from geartrain_callbacks.manual.gradients import changed_since, gradients_now
from geartrain_callbacks.manual.scaling import ManuallyScaledPrecision
from geartrain_callbacks.precision import ScaledPrecision

#: The distributions whose ``backward`` hook uses the options of ``manual_backward``.
_TAKE_OPTIONS = ("geartrain", "geartrain-callbacks")


class ManualOptimisation:
    """The plugin of manual optimisation: the hooks that differ, and ``manual_backward`` and others.

    geartrain adds it to each ``fit`` of a module with ``automatic_optimization = False``.

    The optimizers are torch's. During the run the plugin replaces their ``step`` and ``zero_grad``,
    so that an optimizer which the module keeps under another name runs the hooks as well.
    """

    #: The strategy's forward would call its wrapper; another step would call backward itself.
    must_own = frozenset({"step", "forward", "clip_gradients"})
    #: Users cannot select it by name: with another module, nothing would call backward.
    added_for = "a module with automatic_optimization = False"

    def __init__(self) -> None:
        #: The options of ``manual_backward`` for ``loss.backward``.
        self.options: dict[str, Any] = {}
        #: Called with an optimizer after its gradients were cleared.
        self.on_cleared: Callable[[Optimizer], Any] | None = None
        #: The limit and the algorithm while ``clip_gradients`` runs.
        self._limit: tuple[float, str] | None = None
        #: Number of optimizer steps.
        self._steps = 0
        #: Parameters whose gradients were averaged at any time.
        self._averaged: set[torch.nn.Parameter] = set()
        #: Optimizers that were checked for gradients which were not averaged.
        self._looked_at: set[Optimizer] = set()
        #: Optimizers whose gradients the hooks have seen since the last backward.
        self._seen: set[Optimizer] = set()
        #: While it steps: the optimizer whose original ``step`` must be called.
        self._stepping: Optimizer | None = None
        self._toggled: tuple[Optimizer, dict[torch.nn.Parameter, bool]] | None = None
        self._taken: list[Callable[[], None]] = []

    def replace_parts(self, parts: Sequence[LoadedPlugin], module: Any) -> list[LoadedPlugin]:
        """Return a trainer's parts, changed for manual optimisation; this part follows them."""
        # Without core's clipping: two parts cannot own clip_gradients. check_plan has the fix.
        return [
            replace(part, plugin=ManuallyScaledPrecision())
            if type(part.plugin) is ScaledPrecision
            else part
            for part in parts
            if not (part.info.is_core and part.info.name == "clipping")
        ]

    # --- hooks ------------------------------------------------------------------------------------

    @hookimpl
    def check_plan(self, plan: Plan, module: Module | type[Module]) -> None:
        """Raise for options of the trainer that only automatic optimisation uses."""
        cls = module if isinstance(module, type) else type(module)
        false = f"{cls.__name__}.automatic_optimization is False"
        if (every := plan.options.accumulate_grad_batches) != 1:
            raise UsageError(
                f"{false}, so accumulate_grad_batches={every} would do nothing. "
                f"Fix: call zero_grad() and step() once in {every} batches"
            )
        if (limit := plan.options.gradient_clip_val) is not None:
            raise UsageError(
                f"{false}, so gradient_clip_val={limit} would do nothing. "
                f"Fix: self.clip_gradients(optimizer, {limit}) in training_step, before "
                "optimizer.step()"
            )

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        run.loop.step_functions, run.loop.manual, self._run = (
            run.loop.unwrapped.calls(run.loop.unwrapped),
            self,
            run,
        )
        self._average_gradients = _average_gradients_of(run)
        self._taken = [self._take_over(optimizer) for optimizer in run.optimizers]

    @hookimpl
    def step(self, run: Run, micro_batches: Sequence[Any]) -> None:
        hooks, (run.batch,) = run.hooks, micro_batches  # check_plan refuses accumulation
        place = {"run": run, "batch": run.batch, "batch_idx": run.batch_idx}
        if -1 in hooks.on_train_batch_start(**place):
            run.coordinator.end_epoch(run)
        with hooks.micro_step(run=run, first=True, last=True):
            run.loop.step_output = hooks.forward(
                run=run, method="training_step", args=(run.batch, run.batch_idx)
            )
        if (
            isinstance(run.loop.step_output, Mapping)
            and {"loss", "weight"} <= run.loop.step_output.keys()
        ):
            raise TrainingError(
                "training_step returned a loss with a weight, which manual optimisation does not "
                "use. Fix: divide the loss before manual_backward, and return it without 'weight'"
            )
        run.loop.stepped = run.batch_idx + 1
        hooks.on_train_batch_end(outputs=run.loop.step_output, **place)

    @hookimpl
    def forward(self, run: Run, method: str, args: tuple[Any, ...]) -> Any:
        return run.loop.step_functions[method](*args)

    @hookimpl
    def backward(self, run: Run, loss: torch.Tensor) -> None:
        run.module.backward(loss, **self.options)

    @hookimpl
    def clip_gradients(self, run: Run) -> torch.Tensor | None:
        return None if self._limit is None else clip(run.optimizers, *self._limit)

    @hookimpl
    def on_epoch_end(self, run: Run) -> None:
        if not self._steps and run.world.rank == 0:
            warn(
                f"{type(run.module).__name__}.automatic_optimization is False, but no optimizer "
                "was stepped in the first epoch. "
                "Fix: self.optimizers().step() in training_step, or automatic_optimization = True"
            )
        self._steps += 1  # to warn once

    @hookimpl
    def on_run_end(self) -> None:
        self._release()

    @hookimpl
    def on_exception(self) -> None:
        self._release()

    # --- backward ---------------------------------------------------------------------------------

    def manual_backward(self, loss: torch.Tensor, options: dict[str, Any]) -> None:
        run = self._run
        if not isinstance(loss, torch.Tensor):
            raise TrainingError(
                f"self.manual_backward needs the loss, a tensor, but got {type(loss).__name__}"
            )
        owner = run.hooks.owner("backward")
        if options and owner is not None and owner.distribution not in _TAKE_OPTIONS:
            raise TrainingError(
                f"{owner.label} owns the hook 'backward', which takes no {', '.join(options)}. "
                "Fix: remove these options"
            )
        run.hooks.on_before_backward(run=run, loss=loss)
        parameters = (
            list(dict.fromkeys([*run.module.parameters(), *parameters_of(run.optimizers)]))
            if self._average_gradients
            else []
        )
        before = gradients_now(parameters)
        self.options = options
        try:
            with self._without_autocast():
                run.backward(loss)
        finally:
            self.options = {}
            torch.clear_autocast_cache()  # its 16-bit weights belong to the freed graph
        if self._average_gradients:
            # A gradient that this backward added to is averaged as a whole. This is correct: the
            # part of earlier backwards is the same on all ranks, so the average does not change it.
            self._averaged.update(
                self._average_gradients(run, parameters, changed_since(parameters, before))
            )
        self._seen.clear()
        run.hooks.on_after_backward(run=run)

    # --- clipping and steps -----------------------------------------------------------------------

    def clip(self, optimizer: Optimizer, limit: float, algorithm: str) -> torch.Tensor | None:
        check_clip(limit, algorithm)
        self._limit = (float(limit), algorithm)
        try:
            return self._show(self._known(optimizer))
        finally:
            self._limit = None

    def _show(self, optimizer: Optimizer) -> torch.Tensor | None:
        """Fire the hooks before a step, for this optimizer only; return the norm if clipped."""
        run = self._run
        every, run.optimizers = run.optimizers, [optimizer]
        try:
            run.hooks.reduce_gradients(run=run)
            norm: torch.Tensor | None = run.hooks.clip_gradients(run=run)
        finally:
            run.optimizers = every
        self._seen.add(optimizer)
        return norm

    def _step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        run, losses = self._run, list[Any]()
        again = self._same_autocast()

        def ready() -> None:
            if optimizer not in self._seen:
                self._show(optimizer)
            self._look_for_own_backward(optimizer)
            run.hooks.on_before_optimizer_step(run=run, optimizer=optimizer)

        def evaluate() -> Any:
            assert closure is not None
            with again:
                loss = closure()
            ready()
            losses.append(run.coordinator.mean_loss(run, loss))
            return losses[-1]

        with self._without_autocast():
            if closure is None:
                ready()
            before, self._stepping = self._stepping, optimizer
            try:
                run.hooks.optimizer_step(
                    run=run, optimizer=optimizer, closure=None if closure is None else evaluate
                )
            finally:
                self._stepping = before
                # Otherwise the next forward in this training_step would use the old weights.
                torch.clear_autocast_cache()
        self._seen.discard(optimizer)
        self._steps += 1
        return losses[0] if losses else None

    def _look_for_own_backward(self, optimizer: Optimizer) -> None:
        if not self._average_gradients or optimizer in self._looked_at:
            return
        with_gradient = [
            parameter for parameter in parameters_of([optimizer]) if parameter.grad is not None
        ]
        if with_gradient and self._averaged.isdisjoint(with_gradient):
            warn(
                f"{type(optimizer).__name__} steps with gradients that self.manual_backward did "
                "not average: unless you average them, the ranks' weights drift apart. "
                "Fix: self.manual_backward(loss) instead of loss.backward()"
            )
        self._looked_at.add(optimizer)

    def _known(self, optimizer: Optimizer) -> Optimizer:
        if not any(optimizer is known for known in self._run.optimizers):
            raise TrainingError(
                f"{type(optimizer).__name__} is none of this module's optimizers. "
                "Fix: use one of self.optimizers()"
            )
        return optimizer

    # --- toggles ----------------------------------------------------------------------------------

    def toggle(self, optimizer: Optimizer) -> None:
        self._known(optimizer)
        if self._toggled is not None:
            raise TrainingError(
                "an optimizer is already toggled. "
                "Fix: first call self.untoggle_optimizer(...) with that optimizer"
            )
        before = {
            parameter: parameter.requires_grad for parameter in parameters_of(self._run.optimizers)
        }
        parameters = set(
            parameters_of([optimizer])
        )  # parameters that optimizers share do not change
        for parameter in before:
            if parameter not in parameters:
                parameter.requires_grad_(False)
        self._toggled = optimizer, before

    def untoggle(self, optimizer: Optimizer) -> None:
        if self._toggled is None or self._toggled[0] is not optimizer:
            message = "no optimizer is" if self._toggled is None else "another optimizer is"
            raise TrainingError(
                f"self.untoggle_optimizer: {message} toggled. "
                "Fix: first call self.toggle_optimizer(...) with the same optimizer"
            )
        _, before = self._toggled
        self._toggled = None
        for parameter, needs in before.items():
            parameter.requires_grad_(needs)

    # --- the optimizers' methods ------------------------------------------------------------------

    def _take_over(self, optimizer: Optimizer) -> Callable[[], None]:
        """Replace the optimizer's ``step`` and ``zero_grad``; return a function to restore them."""
        own_step, own_zero_grad = optimizer.step, optimizer.zero_grad
        before = {name: vars(optimizer).get(name) for name in ("step", "zero_grad")}

        @wraps(own_step)  # a scheduler marks step and later looks for its mark
        def step(self_: Optimizer, closure: Callable[[], Any] | None = None, **more: Any) -> Any:
            if self._stepping is optimizer:
                return own_step(**more) if closure is None else own_step(closure, **more)
            if more:
                raise TypeError(
                    f"{type(optimizer).__name__}.step of a Trainer takes only a closure, "
                    f"not {', '.join(more)}"
                )
            return self._step(optimizer, closure)

        @wraps(own_zero_grad)
        def zero_grad(self_: Optimizer, *arguments: Any, **more: Any) -> None:
            self._run.hooks.on_before_zero_grad(run=self._run, optimizer=optimizer)
            own_zero_grad(*arguments, **more)
            if self.on_cleared is not None:
                self.on_cleared(optimizer)

        def put_back() -> None:
            for name, method in before.items():
                vars(optimizer).pop(name, None)
                if method is not None:
                    setattr(optimizer, name, method)

        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.zero_grad = MethodType(zero_grad, optimizer)  # type: ignore[method-assign]
        return put_back

    def _release(self) -> None:
        """Restore the optimizers' methods and the parameters' ``requires_grad``."""
        while self._taken:
            self._taken.pop()()
        if self._toggled is not None:
            self.untoggle(self._toggled[0])

    # --- autocast ---------------------------------------------------------------------------------

    def _without_autocast(self) -> AbstractContextManager[Any]:
        """Disable autocast for backward and steps: ``training_step`` may run under autocast."""
        kind = self._run.device.type
        return (
            torch.autocast(kind, enabled=False)
            if torch.is_autocast_enabled(kind)
            else nullcontext()
        )

    def _same_autocast(self) -> AbstractContextManager[Any]:
        """Return the current autocast, for a closure, which computes a loss."""
        kind = self._run.device.type
        return (
            torch.autocast(kind, torch.get_autocast_dtype(kind))
            if torch.is_autocast_enabled(kind)
            else nullcontext()
        )


def _average_gradients_of(
    run: Run,
) -> Callable[[Run, Sequence[torch.nn.Parameter], Sequence[bool]], list[torch.nn.Parameter]] | None:
    """Return the strategy's ``average_gradients``, or ``None`` if ``reduce_gradients`` averages.

    A strategy with a process group needs the method, whichever part owns ``reduce_gradients``. If
    the strategy reduces in its wrapper's backward, its ``reduce_gradients`` does nothing. If a part
    really averages there, it gets means, and the average does not change them.

    Raises:
        TrainingError: neither would average gradients.
    """
    if run.world.size == 1:
        return None
    strategy = next(part.plugin for part in run.hooks.parts if part.info.kind == "strategy")
    if average := getattr(strategy, "average_gradients", None):
        return average  # type: ignore[no-any-return]
    owner = run.hooks.owner("reduce_gradients")
    if owner is None or owner.kind == "default" or (dist.is_available() and dist.is_initialized()):
        raise TrainingError(
            f"{run.plan.strategy.label} has {run.world.size} ranks and no method "
            "average_gradients, so manual optimisation would average no gradients. "
            "Fix: extend geartrain.parallel.ProcessGroupStrategy (pip install geartrain-parallel), "
            "or define the method"
        )
    return None
