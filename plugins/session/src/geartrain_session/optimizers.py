"""The optimizers that a Session hands back: a step through the hooks."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from geartrain import TrainingError, UsageError
from geartrain.plugin_api import mean_over_ranks

if TYPE_CHECKING:
    from geartrain import Run
    from geartrain_session.models import SessionModel
    from geartrain_session.session import Session


class Stepper:
    """What ``optimizer.step()`` does in a Session: reduce, unscale, clip, step, each through its hook.

    Args:
        run: the session's, with this optimizer alone and its model.
    """

    def __init__(self, session: Session, run: Run, model: SessionModel) -> None:
        self._session, self._run, self._model, self._hooks = session, run, model, run.hooks
        #: The model's count of reducing calls when this optimizer last stepped.
        self._seen = 0
        #: How many backwards the session had seen when the gradients were reduced for the step that comes; ``None``: not yet.
        self._reduced: int | None = None
        #: How many backwards the session had seen at the last reduction, and whether a step without another is an error.
        self._backwards, self._scaled = 0, run.plan.precision.name == "16-mixed"
        #: Whether the newest step was taken; a gradient scaler skips those that overflowed.
        self.stepped = True
        #: Whether there is nothing to do before a step.
        self._plain = run.world.size == 1 and run.hooks.reduce_gradients is None and run.hooks.clip_gradients is None

    def reduce(self) -> None:
        """Make the gradients those that the step will use: of all ranks, unscaled. Once a step.

        Raises:
            TrainingError: they are not reduced by this step's backward, or another backward came after they were.
        """
        session, run = self._session, self._run
        if self._reduced is not None:
            if self._reduced != session._backwards:
                raise TrainingError("session.backward came between clip_gradients and step: its gradients are not clipped, nor reduced")
            return
        if self._scaled and self._backwards == session._backwards:
            raise TrainingError(
                "there was no session.backward since the last step: 16-mixed scales the loss there. Fix: session.backward(loss)"
            )
        if run.world.size > 1:
            if self._seen == self._model._calls.reducing:
                raise TrainingError(
                    f"{type(run.module).__name__} was not called through what session.setup returned, outside of no_backward_sync, since "
                    "the last step: the ranks' gradients would differ. Fix: call that; for a method other than forward first "
                    "model.mark_forward_method(NAME)"
                )
            self._seen = self._model._calls.reducing
        if self._hooks.reduce_gradients is not None:
            self._hooks.reduce_gradients(run=run)
        self._reduced = self._backwards = session._backwards

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Returns what the closure returned, as torch's optimizers do.

        Raises:
            UsageError: an optimizer that needs a closure has none.
        """
        run, session, loss = self._run, self._session, None
        if run.model is None:
            raise UsageError("the session is closed. Fix: step inside `with Session(...)`, or before session.close()")
        if not session._begun:
            session._begin()
        if run.closure:
            loss = self._closure_step(closure)
        else:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            if not self._plain or self._reduced is not None:
                self._gradients()
            self.stepped = self._hooks.optimizer_step(run=run, optimizer=run.optimizers[0], closure=None) is not False
        self._reduced = None
        session._stepped(run)
        return loss

    def _gradients(self) -> None:
        self.reduce()
        if self._hooks.clip_gradients is not None:
            self._hooks.clip_gradients(run=self._run)

    def _closure_step(self, closure: Callable[[], Any] | None) -> Any:
        """The step of an optimizer that computes the loss itself, several times, as LBFGS does."""
        run, losses = self._run, []
        if closure is None:
            raise UsageError(f"{type(run.optimizers[0]).__name__} needs a closure. Fix: optimizer.step(closure)")

        def whole() -> Any:
            loss = closure()
            self._gradients()
            self._reduced = None
            losses.append(mean_over_ranks(run, loss))
            return losses[-1]

        self.stepped = self._hooks.optimizer_step(run=run, optimizer=run.optimizers[0], closure=whole) is not False
        return losses[0] if losses else None


class StepForwarder:
    """The attribute ``step`` of an optimizer in a Session; a scheduler may put its own around it, and that one is asked then."""

    hooked = True  # torch would else put a profiler's range around it, as if it were a function

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper
        self._around: Any = None

        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return stepper.step(closure)

        self._function = step  # schedulers look for it in the method

    def __get__(self, optimizer: Any, cls: type | None = None) -> Any:
        if optimizer is None:
            return self
        return MethodType(self._function, optimizer) if self._around is None else self._around

    def __set__(self, optimizer: Any, value: Any) -> None:
        self._around = value


def session_optimizer(optimizer: Optimizer, stepper: Stepper) -> Any:
    """The same optimizer, state and parameter groups shared, whose ``step`` is the session's; of its class, for schedulers."""
    cls = type(type(optimizer).__name__, (type(optimizer),), {"step": StepForwarder(stepper)})
    same: Any = object.__new__(cls)
    same.__dict__ = optimizer.__dict__
    return same


def stepper_of(optimizer: Any) -> Stepper:
    """What steps a session's optimizer.

    Raises:
        UsageError: it is none.
    """
    step = type(optimizer).__dict__.get("step")
    if not isinstance(step, StepForwarder):
        raise UsageError(f"{type(optimizer).__name__} is no optimizer that session.setup returned. Fix: step that one")
    return step.stepper
