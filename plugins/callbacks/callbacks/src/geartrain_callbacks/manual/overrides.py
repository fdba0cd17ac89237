"""The methods of a module that replace a part of the training step, as parts of its ``fit``.

``backward`` and ``configure_gradient_clipping`` own their hooks. ``optimizer_step`` surrounds its
hook with all wrappers: there ``optimizer.step`` calls the hook, thus a gradient scaler, and a step
that the module does not take reaches no plugin.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from geartrain import Plan, Run, TrainingError, UsageError, hookimpl
from geartrain.plugin_api import (
    LoadedPlugin,
    PluginInfo,
    overridden,
)
from geartrain_callbacks.manual.clipping import check_clip, clip
from geartrain_callbacks.precision import ScaledPrecision


class Overrides:
    """Adds a part for each method of the module that replaces a part of the training step.

    ``lr_scheduler_step`` needs none: the loop calls it in any case.
    """

    added_for = "a module with such methods"

    def replace_parts(self, parts: Sequence[LoadedPlugin], module: Any) -> list[LoadedPlugin]:
        """Return a trainer's parts, and those of the module's own methods."""
        if not module.automatic_optimization:
            return list(parts)
        replaced: dict[str, Any] = {
            "backward": OwnBackward,
            "configure_gradient_clipping": OwnClipping,
            "optimizer_step": OwnStep,
            "optimizer_zero_grad": OwnZeroGrad,
        }
        replaced = {name: part for name, part in replaced.items() if overridden(module, name)}
        if any(isinstance(part.plugin, ScaledPrecision) for part in parts):
            replaced.pop("backward", None)  # the precision calls it
        if "configure_gradient_clipping" in replaced:  # two parts cannot own clip_gradients
            parts = [p for p in parts if not (p.info.is_core and p.info.name == "clipping")]
        cls = (module if isinstance(module, type) else type(module)).__name__
        added = [
            LoadedPlugin(PluginInfo(f"{cls}.{name}", "core", None, None, "its module"), part())
            for name, part in replaced.items()
        ]
        return [*parts, *added]


class OwnBackward:
    """Calls ``module.backward``. With 16-mixed the precision calls it, with the scaled loss."""

    must_own = frozenset({"backward"})

    @hookimpl
    def backward(self, run: Run, loss: torch.Tensor) -> None:
        run.module.backward(loss)


class OwnClipping:
    """Calls ``module.configure_gradient_clipping`` for each optimizer."""

    must_own = frozenset({"clip_gradients"})

    @hookimpl
    def clip_gradients(self, run: Run) -> None:
        limit = run.plan.options.gradient_clip_val
        algorithm = run.plan.options.gradient_clip_algorithm
        run.loop.manual = self  # the module's clip_gradients calls it
        try:
            for optimizer in run.optimizers:
                run.module.configure_gradient_clipping(optimizer, limit, algorithm)
        finally:
            run.loop.manual = None

    def clip(
        self, optimizer: Optimizer, limit: float | None, algorithm: str
    ) -> torch.Tensor | None:
        if limit is None:
            return None
        check_clip(limit, algorithm)
        return clip([optimizer], limit, algorithm)


class OwnStep:
    """Calls ``module.optimizer_step`` in place of the hook, which ``optimizer.step`` then calls."""

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        self._hook = run.hooks.replace_caller("optimizer_step", self._step)

    @hookimpl
    def on_train_batch_start(self, batch_idx: int) -> None:
        self._batch_idx = batch_idx

    def _step(self, run: Run, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
        """Let the module step; return ``False`` if it did not, so that schedulers wait."""
        module, before = run.module, vars(optimizer).get("step")
        called = stepped = False

        def known_loss() -> torch.Tensor | None:
            output = run.loop.step_output
            loss = output["loss"] if isinstance(output, Mapping) else output
            return None if loss is None else loss.detach()

        @functools.wraps(optimizer.step)  # a scheduler marks step and later looks for its mark
        def step(closure: Callable[[], Any] | None = None) -> Any:
            nonlocal called, stepped
            called, losses = True, list[Any]()

            def keep() -> Any:
                losses.append(None if closure is None else closure())
                return losses[-1]

            if run.loop.needs_closure and closure is None:
                raise TrainingError(_without_closure(run, optimizer))
            if not run.loop.needs_closure:
                keep()
            _restore(optimizer, "step", before)
            try:
                later = keep if run.loop.needs_closure else None
                result = self._hook(run=run, optimizer=optimizer, closure=later)
            finally:
                optimizer.step = step  # type: ignore[method-assign]
            stepped |= result is not False
            return losses[0]

        optimizer.step = step  # type: ignore[method-assign]
        try:
            batch_idx = run.batch_idx if run.loop.needs_closure else self._batch_idx
            module.optimizer_step(run.epoch, batch_idx, optimizer, closure or known_loss)
        finally:
            _restore(optimizer, "step", before)
        if run.loop.needs_closure and not called:
            raise TrainingError(_without_closure(run, optimizer))
        return stepped


class OwnZeroGrad:
    """Calls ``module.optimizer_zero_grad``, in which ``optimizer.zero_grad`` is the optimizer's."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    @hookimpl
    def check_plan(self, plan: Plan) -> None:
        if plan.precision.name == "16-mixed":  # kept gradients are unscaled, new ones are scaled
            message = (
                "optimizer_zero_grad may keep gradients, which 16-mixed would scale down twice"
            )
            raise UsageError(
                f"{message}. Fix: --precision bf16-mixed or 32, or take out the method"
            )

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        self._undo = [self._take_over(run, optimizer) for optimizer in run.optimizers]

    def _take_over(self, run: Run, optimizer: Optimizer) -> Callable[[], None]:
        before, own, inside = vars(optimizer).get("zero_grad"), optimizer.zero_grad, False

        def zero_grad(set_to_none: bool = True) -> None:
            nonlocal inside
            if inside:
                own(set_to_none)
                return
            inside = True
            try:
                run.module.optimizer_zero_grad(run.epoch, run.batch_idx, optimizer)
            finally:
                inside = False

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        return functools.partial(_restore, optimizer, "zero_grad", before)

    @hookimpl
    def on_run_end(self) -> None:
        self._release()

    @hookimpl
    def on_exception(self) -> None:
        self._release()

    def _release(self) -> None:
        while self._undo:
            self._undo.pop()()


def _restore(optimizer: Optimizer, name: str, before: Any) -> None:
    """Restore a method of an optimizer; ``before`` is the instance's own, or ``None``."""
    vars(optimizer).pop(name, None)
    if before is not None:
        setattr(optimizer, name, before)


def _without_closure(run: Run, optimizer: Optimizer) -> str:
    message = f"{type(run.module).__name__}.optimizer_step did not give {type(optimizer).__name__} "
    return f"{message}its closure. Fix: optimizer.step(closure=optimizer_closure)"
