"""The optimizers that a Session returns: each step runs the hooks."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from geartrain import TrainingError, UsageError

if TYPE_CHECKING:
    from geartrain import Run
    from geartrain_session.models import SessionModel
    from geartrain_session.session_run import SessionRun


class Stepper:
    """The ``step()`` of one optimizer in a Session: reduce, unscale, clip, step, each by its hook.

    Args:
        session_run: the run of the session.
        run: a copy of its run, with only this optimizer and its model.
        model: the model whose gradients are reduced.
    """

    def __init__(self, session_run: SessionRun, run: Run, model: SessionModel) -> None:
        self._session_run, self._run, self._model, self._hooks = session_run, run, model, run.hooks
        #: The model's count of reducing calls at this optimizer's last step.
        self._seen = 0
        #: The run's count of backwards at the reduction for the next step; ``None`` before it.
        self._reduced: int | None = None
        #: The run's count of backwards at the last reduction.
        self._backwards = 0
        #: True if a step without a backward since the last one is an error.
        self._scaled = run.plan.precision.name == "16-mixed"
        #: True if the last step was taken; a gradient scaler skips steps after an overflow.
        self.stepped = True
        #: True if no work comes before a step.
        self._plain = (
            run.world.size == 1
            and run.hooks.is_default("reduce_gradients")
            and run.hooks.is_default("clip_gradients")
        )

    def reduce(self) -> None:
        """Reduce gradients over ranks and unscale them for the step. Once per step.

        Raises:
            TrainingError: this step's backward does not reduce them, or another backward came after
                the reduction.
        """
        session_run, run = self._session_run, self._run
        if self._reduced is not None:
            if self._reduced != session_run.backwards:
                raise TrainingError(
                    "session.backward came between clip_gradients and step: its gradients are "
                    "neither clipped nor reduced. Fix: call clip_gradients after the last backward"
                )
            return
        if self._scaled and self._backwards == session_run.backwards:
            raise TrainingError(
                "there was no session.backward since the last step, but 16-mixed scales the loss "
                "in it. Fix: session.backward(loss)"
            )
        if run.world.size > 1:
            if self._seen == self._model._calls.reducing:
                raise TrainingError(
                    f"{type(run.module).__name__} was not called through the model that "
                    "session.setup returned, outside of no_backward_sync, since the last step: the "
                    "ranks' gradients would differ. Fix: call that model; for a method other than "
                    "forward, first call model.mark_forward_method(NAME)"
                )
            self._seen = self._model._calls.reducing
        self._hooks.reduce_gradients(run=run)
        self._reduced = self._backwards = session_run.backwards

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step once.

        Returns:
            The closure's result, as torch's optimizers do; ``None`` without a closure.

        Raises:
            UsageError: the session is closed, or the optimizer needs a closure.
        """
        run, session_run, loss = self._run, self._session_run, None
        if run.model is None:
            raise UsageError(
                "the session is closed. "
                "Fix: step inside `with Session(...)`, or before session.close()"
            )
        session_run.begin()
        if run.loop.needs_closure:
            loss = self._closure_step(closure)
        else:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            if not self._plain or self._reduced is not None:
                self._gradients()
            self.stepped = (
                self._hooks.optimizer_step(run=run, optimizer=run.optimizers[0], closure=None)
                is not False
            )
        self._reduced = None
        session_run.stepped(run)
        return loss

    def _gradients(self) -> None:
        self.reduce()
        self._hooks.clip_gradients(run=self._run)

    def _closure_step(self, closure: Callable[[], Any] | None) -> Any:
        """Step an optimizer that computes the loss itself, maybe several times, such as LBFGS."""
        run, losses = self._run, []
        if closure is None:
            raise UsageError(
                f"{type(run.optimizers[0]).__name__} needs a closure. Fix: optimizer.step(closure)"
            )

        def whole() -> Any:
            loss = closure()
            self._gradients()
            self._reduced = None
            losses.append(run.coordinator.mean_loss(run, loss))
            return losses[-1]

        self.stepped = (
            self._hooks.optimizer_step(run=run, optimizer=run.optimizers[0], closure=whole)
            is not False
        )
        return losses[0] if losses else None


class SessionStep:
    """The attribute ``step`` of an optimizer in a Session. A scheduler may replace it."""

    hooked = True  # otherwise torch wraps it in a profiler's range

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper
        self._around: Any = None

        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return stepper.step(closure)

        self._function = step  # schedulers read the method's function

    def __get__(self, optimizer: Any, cls: type | None = None) -> Any:
        if optimizer is None:
            return self
        return MethodType(self._function, optimizer) if self._around is None else self._around

    def __set__(self, optimizer: Any, value: Any) -> None:
        self._around = value


def session_optimizer(optimizer: Optimizer, stepper: Stepper) -> Any:
    """Return the optimizer with the session's ``step``.

    It shares state and groups. Its class is a subclass of the optimizer's, as schedulers expect.
    """
    methods: dict[str, Any] = {"step": SessionStep(stepper)}
    if type(optimizer).zero_grad is Optimizer.zero_grad:  # not overridden, as by horovod
        methods["zero_grad"] = _zero_grad
    cls = type(type(optimizer).__name__, (type(optimizer),), methods)
    same: Any = object.__new__(cls)
    same.__dict__ = optimizer.__dict__
    return same


def _zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
    """Clear the gradients, without torch's bookkeeping, which costs 5 µs a step."""
    if not set_to_none:
        Optimizer.zero_grad(self, set_to_none=False)
        return
    for group in self.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def stepper_of(optimizer: Any) -> Stepper:
    """Return the stepper of a session's optimizer.

    Raises:
        UsageError: the optimizer was not set up.
    """
    step = type(optimizer).__dict__.get("step")
    if not isinstance(step, SessionStep):
        raise UsageError(
            f"{type(optimizer).__name__} is no optimizer that session.setup returned. "
            "Fix: use the returned optimizer"
        )
    return step.stepper


def owns(module: nn.Module, optimizer: Optimizer) -> bool:
    """True if the model has all parameters that an optimizer steps."""
    parameters = {id(parameter) for parameter in module.parameters()}
    return all(
        id(parameter) in parameters
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


def check_optimizer(module: nn.Module, optimizer: Any) -> None:
    """Raise for an optimizer that cannot be set up with a model.

    Raises:
        UsageError: it is no optimizer, is already set up, or steps parameters of another model.
    """
    name = type(module).__name__
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"setup({name}, {type(optimizer).__name__}): the arguments after the model are not "
            "optimizers. Fix: setup(model, optimizer, ...)"
        )
    if isinstance(type(optimizer).__dict__.get("step"), SessionStep):
        raise UsageError(
            f"this {type(optimizer).__name__} is already set up. "
            "Fix: call setup once, and use its result"
        )
    if not owns(module, optimizer):
        raise UsageError(
            f"{type(optimizer).__name__} steps parameters that {name} does not have. "
            "Fix: create it from model.parameters(); for one optimizer of several models, set up "
            "nn.ModuleList([a, b])"
        )
