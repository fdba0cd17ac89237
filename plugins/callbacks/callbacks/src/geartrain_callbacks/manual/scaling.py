"""16-mixed in manual optimisation: optimizers step in any order, any number of times per batch."""

from __future__ import annotations

from collections.abc import Callable, Generator
from enum import Enum, auto
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from geartrain import Run, TrainingError, hookimpl
from geartrain.plugin_api import parameters_of
from geartrain_callbacks.manual.gradients import changed_since, gradients_now
from geartrain_callbacks.precision import SKIPPED, ScaledPrecision


class _Now(Enum):
    """The state of an optimizer's gradients; gradients without a state are scaled."""

    UNSCALED = auto()
    #: Unscaled; some were not finite.
    OVERFLOWED = auto()
    #: A backward added scaled gradients to unscaled ones.
    MIXED = auto()


class ManuallyScaledPrecision(ScaledPrecision):
    """Scale each loss in ``manual_backward``; unscale an optimizer's gradients at clip or step.

    The scale changes only between batches. Gradients that wait for a step in a later batch are
    rescaled with it. torch's scaler changes the scale for all optimizers at once, which would make
    the waiting gradients wrong.
    """

    @hookimpl(wrapper=True)
    def wrap_model(self, run: Run) -> Generator[None, nn.Module, nn.Module]:
        self._seen = set[int]()
        self._usual = torch.amp.GradScaler(run.device.type)
        self._scale, self._clean, self._batch = self._usual.get_scale(), 0, run.step
        self._overflowed = self._any_step = False
        self._now = dict[Optimizer, _Now]()
        self._scalers = dict[Optimizer, torch.amp.GradScaler]()
        return (yield)

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        run.loop.manual.on_cleared = self._forget

    @hookimpl
    def backward(self, run: Run, loss: torch.Tensor) -> None:
        if run.step != self._batch:
            self._adjust(run)
        for optimizer in [o for o in self._now if all(p.grad is None for p in parameters_of([o]))]:
            self._forget(optimizer)  # cleared without its zero_grad
        before = {optimizer: gradients_now(parameters_of([optimizer])) for optimizer in self._now}
        run.module.backward(loss * self._scale, **run.loop.manual.options)
        for optimizer, was in before.items():
            if any(changed_since(parameters_of([optimizer]), was)):
                # An error only if the optimizer steps: another loss may add to these gradients.
                self._now[optimizer] = _Now.MIXED

    @hookimpl(wrapper=True)
    def reduce_gradients(self, run: Run) -> Generator[None, None, None]:
        yield
        for optimizer in run.optimizers:
            if any(p.grad is not None for p in parameters_of([optimizer])):
                self._unscale(run, optimizer)

    @hookimpl
    def optimizer_step(  # type: ignore[override]  # hooks are called by name
        self, run: Run, optimizer: Optimizer, closure: Callable[[], Any] | None
    ) -> bool:
        if closure is not None:
            raise TrainingError(
                f"{self._label} cannot skip steps that have a closure. "
                "Fix: --precision bf16-mixed or 32"
            )
        scaler = self._scalers.pop(optimizer, None)
        if scaler is None or all(p.grad is None for p in parameters_of([optimizer])):
            if self._now.get(optimizer) is _Now.OVERFLOWED:
                return False
            optimizer.step()
            return True
        self._stepped = False
        note = optimizer.register_step_pre_hook(self._note)
        try:
            scaler.step(optimizer)  # the CPU waits for the device here
        finally:
            note.remove()
        self._any_step = True
        if not self._stepped:
            self._overflowed, self._now[optimizer] = True, _Now.OVERFLOWED
            run.log(SKIPPED, 1, on_step=False, on_epoch=True, reduce_fx="sum", batch_size=1)
        return self._stepped

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self._scale,
            "clean": self._clean,
            "batch": self._batch,
            "overflowed": self._overflowed,
            "stepped": self._any_step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with this scale."""
        self._scale, self._clean, self._batch = state["scale"], state["clean"], state["batch"]
        self._overflowed, self._any_step = state["overflowed"], state["stepped"]

    def _unscale(self, run: Run, optimizer: Optimizer) -> None:
        current = self._now.get(optimizer)
        if current is _Now.MIXED:
            raise TrainingError(
                f"{self._label}: {type(optimizer).__name__} has gradients that were already "
                "unscaled, and a later backward added scaled ones. Fix: call its zero_grad() "
                "before manual_backward, and clip_gradients() after the last manual_backward "
                "before its step()"
            )
        if current is None:
            scaler = torch.amp.GradScaler(run.device.type, init_scale=self._scale)
            scaler.scale(torch.zeros((), device=run.device))  # the first call creates its tensors
            scaler.unscale_(optimizer)
            self._scalers[optimizer], self._now[optimizer] = scaler, _Now.UNSCALED

    def _forget(self, optimizer: Optimizer) -> None:
        self._now.pop(optimizer, None)
        self._scalers.pop(optimizer, None)

    def _adjust(self, run: Run) -> None:
        """In a new batch, lower the scale after an overflow; raise it after many good batches."""
        before, usual = self._scale, self._usual
        if self._overflowed:
            self._scale, self._clean = before * usual.get_backoff_factor(), 0
        elif self._any_step:
            self._clean += 1
            if self._clean == usual.get_growth_interval():
                self._scale, self._clean = before * usual.get_growth_factor(), 0
        self._batch, self._overflowed, self._any_step = run.step, False, False
        if self._scale != before:
            for optimizer in run.optimizers:
                for parameter in parameters_of([optimizer]):
                    if optimizer not in self._now and parameter.grad is not None:
                        # A power of two, so there is no rounding.
                        parameter.grad.mul_(self._scale / before)
