"""``lr_monitor``: log the learning rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from geartrain import Run, UsageError, hookimpl
from geartrain_callbacks.callback import PluginCallback

#: The ends of the names of other values than rates.
_MOMENTUM, _WEIGHT_DECAY = "-momentum", "-weight_decay"


class LearningRateMonitor(PluginCallback):
    """Log each optimizer's learning rate under PyTorch Lightning's names.

    The name is ``lr-SGD``, for a second optimizer of that class ``lr-SGD-1``. Parameter groups are
    ``lr-SGD/pg1``, ``lr-SGD/pg2``, or have their ``"name"`` in place of ``pg1``. If
    ``configure_optimizers`` gives a scheduler a ``"name"``, it replaces ``lr-SGD``. A step is
    logged with the rate that it used.

    Args:
        logging_interval: ``"step"``: every ``log_every_n_steps``; ``"epoch"``: at an epoch's end,
            the rate at its start. Default: as often as the scheduler steps; without a scheduler,
            every ``log_every_n_steps``.
        log_momentum: also log ``NAME-momentum``: ``momentum``, or the first of ``betas``, or 0.
        log_weight_decay: also log ``NAME-weight_decay``.

    Attributes:
        lrs: name -> the rates logged in this fit, in order. A rate that is a tensor stays one.
        last_momentum_values: name -> the newest momentum.
        last_weight_decay_values: name -> the newest weight decay.

    Raises:
        UsageError: the interval is wrong, or two parameter groups have the same name.
    """

    errors_are_warnings = True

    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        if logging_interval not in (None, "step", "epoch"):
            raise UsageError(
                f"lr_monitor: logging_interval={logging_interval!r}. Fix: 'step', 'epoch' or None"
            )
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self._named: list[tuple[str, Optimizer, str]] = []
        self._ahead: dict[str, Any] = {}
        self.lrs: dict[str, list[Any]] = {}
        self.last_momentum_values: dict[str, Any] = {}
        self.last_weight_decay_values: dict[str, Any] = {}

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        if run.command == "fit":
            self.lrs, self.last_momentum_values, self.last_weight_decay_values = {}, {}, {}
        self._named = list(_named(run))
        # Check both intervals before training starts: names must be unique.
        for interval in ("epoch", "step"):
            self._values(interval)

    @hookimpl
    def on_epoch_start(self, run: Run) -> None:
        self._log(run, self._values("epoch"), on_step=False)
        self._ahead = self._values("step")

    @hookimpl
    def on_step_end(self, run: Run) -> None:
        every = run.plan.options.log_every_n_steps
        if run.step % every == 0:
            self._log(run, self._ahead, on_step=True)
        if (run.step + 1) % every == 0:
            # The schedulers have stepped, so these are the rates of the next step.
            self._ahead = self._values("step")

    def _log(self, run: Run, values: dict[str, Any], on_step: bool) -> None:
        for name, value in values.items():
            run.log(name, value, on_step=on_step, on_epoch=not on_step, batch_size=1)
            if name.endswith(_MOMENTUM):
                self.last_momentum_values[name] = value
            elif name.endswith(_WEIGHT_DECAY):
                self.last_weight_decay_values[name] = value
            else:
                self.lrs.setdefault(name, []).append(value)

    def _values(self, interval: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for base, optimizer, own in self._named:
            if interval != (self.logging_interval or own):
                continue
            groups = optimizer.param_groups  # read each time: training may add groups
            for i, group in enumerate(groups, start=1):
                label = group.get("name", f"pg{i}" if len(groups) > 1 else "")
                name = f"{base}/{label}" if label else base
                if name in found:
                    raise UsageError(
                        "geartrain-callbacks[lr_monitor]: two parameter groups are called "
                        f"{name}. Fix: give each a unique name"
                    )
                found[name] = _now(group.get("lr", 0.0))
                if self.log_momentum:
                    found[name + _MOMENTUM] = _now(
                        group["betas"][0] if "betas" in group else group.get("momentum", 0.0)
                    )
                if self.log_weight_decay:
                    found[name + _WEIGHT_DECAY] = _now(group.get("weight_decay", 0.0))
        return found


def _now(value: Any) -> Any:
    """Copy a value: a capturable optimizer's rate is a tensor, which its scheduler changes."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _named(run: Run) -> Iterator[tuple[str, Optimizer, str]]:
    """Yield each optimizer, its name and its default interval; those with a scheduler first."""
    seen: Counter[type] = Counter()
    with_scheduler: set[int] = set()
    for schedule in run.schedulers:
        optimizer = getattr(schedule.scheduler, "optimizer", None)
        # Several schedulers of one optimizer change the same rate, so the first names it.
        if optimizer is None or id(optimizer) in with_scheduler:
            continue
        with_scheduler.add(id(optimizer))
        yield schedule.name or _count(seen, optimizer), optimizer, schedule.interval
    for optimizer in run.optimizers:
        if id(optimizer) not in with_scheduler:
            yield _count(seen, optimizer), optimizer, "step"


def _count(seen: Counter[type], optimizer: Optimizer) -> str:
    seen[type(optimizer)] += 1
    before = seen[type(optimizer)] - 1
    return f"lr-{type(optimizer).__name__}" + (f"-{before}" if before else "")
