"""Optimizers and learning-rate schedulers, in all forms of ``configure_optimizers``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from geartrain.errors import UsageError, nearest

if TYPE_CHECKING:
    from geartrain.loop.run import Run

_CONFIG_KEYS = (
    *("scheduler", "interval", "frequency", "monitor", "strict", "name"),
    "reduce_on_plateau",
)


@dataclass(slots=True)
class Schedule:
    """One scheduler and the times of its steps."""

    scheduler: Any
    #: ``"epoch"`` or ``"step"``.
    interval: str = "epoch"
    #: Epochs or steps from one of its steps to the next.
    frequency: int = 1
    #: The metric that ReduceLROnPlateau reads.
    monitor: str | None = None
    #: True if a missing metric is an error.
    strict: bool = True
    name: str | None = None
    reduce_on_plateau: bool = False
    #: The newest epoch or step at which it was due.
    count: int = 0
    #: The step at which it became due, until its metric has a new value; 0 otherwise.
    due: int = 0
    #: The epoch and the step of the last value that it used: each value counts once.
    judged: tuple[int, int] | None = None

    def progress(self) -> tuple[int, int, tuple[int, int] | None]:
        """Return the state that a checkpoint keeps beside the scheduler's."""
        return self.count, self.due, self.judged

    def set_progress(self, progress: Any) -> None:
        """Restore the state that :meth:`progress` returned."""
        self.count, self.due, judged = progress
        self.judged = None if judged is None else tuple(judged)


def read_optimizers(returned: Any) -> tuple[list[Optimizer], list[Schedule]]:
    """Read what ``configure_optimizers`` returned, in any of Lightning's forms.

    Raises:
        UsageError: anything else; or a scheduler of an optimizer that was not returned.
    """
    optimizers, schedules = _read_forms(returned)
    stepped = {id(group) for optimizer in optimizers for group in optimizer.param_groups}
    for schedule in schedules:
        owner = getattr(schedule.scheduler, "optimizer", None)
        if isinstance(owner, Optimizer) and stepped.isdisjoint(map(id, owner.param_groups)):
            raise UsageError(
                f"configure_optimizers: the {type(schedule.scheduler).__name__} is of "
                f"{type(owner).__name__}, which was not returned: its rates would change nothing. "
                "Fix: return that optimizer, or make the scheduler of one that is returned"
            )
    return optimizers, schedules


def _read_forms(returned: Any) -> tuple[list[Optimizer], list[Schedule]]:
    if returned is None:
        return [], []
    if isinstance(returned, Optimizer):
        return [returned], []
    if isinstance(returned, Mapping):
        return _from_dicts([returned])
    if isinstance(returned, Sequence) and returned:
        if all(isinstance(item, Optimizer) for item in returned):
            return list(returned), []
        if all(isinstance(item, Mapping) for item in returned):
            return _from_dicts(returned)
        if len(returned) == 2 and all(isinstance(item, Sequence) for item in returned):
            optimizers, schedulers = returned
            if optimizers and all(isinstance(item, Optimizer) for item in optimizers):
                return list(optimizers), [_schedule(item) for item in schedulers]
    raise UsageError(
        f"configure_optimizers returned {returned!r}. Fix: return an optimizer, a list of them, "
        'two lists (optimizers, schedulers), a dict {"optimizer": ..., "lr_scheduler": ...}, or a '
        "tuple of such dicts"
    )


def _from_dicts(dicts: Sequence[Mapping[str, Any]]) -> tuple[list[Optimizer], list[Schedule]]:
    optimizers, schedules = [], []
    for dict in dicts:
        unknown = set(dict) - {"optimizer", "lr_scheduler", "monitor"}
        if unknown or not isinstance(dict.get("optimizer"), Optimizer):
            message = ", ".join(sorted(map(repr, unknown))) or "no optimizer under 'optimizer'"
            raise UsageError(
                f"configure_optimizers: a dict has {message}. It takes 'optimizer', 'lr_scheduler' "
                "and 'monitor'; every optimizer steps each time."
            )
        optimizers.append(dict["optimizer"])
        if dict.get("lr_scheduler") is not None:
            schedules.append(_schedule(dict["lr_scheduler"], dict.get("monitor")))
    return optimizers, schedules


def _schedule(given: Any, monitor: str | None = None) -> Schedule:
    if isinstance(given, Mapping):
        for key in given:
            if key not in _CONFIG_KEYS:
                meant = nearest(key, _CONFIG_KEYS)
                raise UsageError(f"configure_optimizers: a scheduler's dict has {key!r}. {meant}")
        schedule = Schedule(**{"scheduler": None, "monitor": monitor, **given})
    else:
        schedule = Schedule(given, monitor=monitor)
    if not callable(getattr(schedule.scheduler, "step", None)):
        raise UsageError(f"configure_optimizers: {schedule.scheduler!r} is not a scheduler.")
    if schedule.interval not in ("epoch", "step") or schedule.frequency < 1:
        message = f"interval={schedule.interval!r}, frequency={schedule.frequency!r}"
        raise UsageError(f"configure_optimizers: {message}: 'epoch' or 'step', at least 1.")
    if isinstance(schedule.scheduler, ReduceLROnPlateau):
        schedule.reduce_on_plateau = True
    if schedule.reduce_on_plateau and schedule.monitor is None:
        raise UsageError(
            "configure_optimizers: ReduceLROnPlateau needs to know its metric. "
            'Fix: {"scheduler": ..., "monitor": "val_loss"}'
        )
    return schedule


def zero_grad(optimizer: Optimizer) -> None:
    """Call ``optimizer.zero_grad()``, without its bookkeeping, which costs 5 µs a step."""
    function = getattr(optimizer.zero_grad, "__func__", None)
    if function is not Optimizer.zero_grad:  # overridden, as by horovod
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def parameters_of(optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
    """Return the parameters that these optimizers step, each once."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return list(dict.fromkeys(parameter for group in groups for parameter in group["params"]))


def wants_closure(optimizer: Optimizer) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def step_schedules(run: Run, interval: str, count: int) -> None:
    """Step the schedulers of one interval, after ``count`` steps or epochs.

    Schedulers that read a metric wait for ``run.loop.step_plateaus``. In manual optimisation the
    module steps all of them.
    """
    for schedule in run.schedulers if run.mode == "automatic" else ():
        if schedule.interval != interval or count % schedule.frequency:
            continue
        if schedule.count == count:  # it is called twice for an epoch
            continue
        schedule.count = count
        if schedule.reduce_on_plateau:
            schedule.due = max(run.step, 1) if interval == "epoch" else count
        else:
            run.module.lr_scheduler_step(schedule.scheduler, None)
