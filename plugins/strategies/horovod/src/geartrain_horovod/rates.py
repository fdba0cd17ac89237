"""Multiplication of learning rates by the number of workers.

The gradient of N workers is the mean over N times as many samples, so the step may be N times as
long: Goyal et al. 2017, https://arxiv.org/abs/1706.02677.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

#: Keys of learning rates in a parameter group: of every optimizer, CyclicLR, OneCycleLR and SWALR.
_IN_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr", "base_lr", "swa_lr")
#: Attributes of learning rates in a scheduler: every scheduler's, CyclicLR's, ReduceLROnPlateau's
#: (new and old name), and those of the cosine schedulers.
_IN_SCHEDULERS = ("base_lrs", "_last_lr", "max_lrs", "min_lrs", "default_min_lr", "eta_min")
#: Key in the first parameter group: the factor that the optimizer's rates already contain. It is
#: saved with the optimizer's state. So rates of a checkpoint, or of an optimizer that
#: ``configure_optimizers`` returns again, are not scaled twice and follow the number of workers.
#: The optimizer's ``defaults``, which no checkpoint contains, have it too: groups that are added
#: later use them.
_MARK = "geartrain_lr_scale"


def scale(optimizer: Optimizer, schedulers: Iterable[Any], factor: int) -> int:
    """Multiply every learning rate of an optimizer and of its schedulers, nested ones included.

    The schedule keeps its shape: at every step the rate is ``factor`` times the configured rate. A
    group that is added later without a rate gets the optimizer's default, which is multiplied too.

    Returns:
        The previous factor of the rates: 1, or the factor of an earlier call with this optimizer or
        with the optimizer whose state it has loaded.
    """
    groups, defaults = optimizer.param_groups, optimizer.defaults
    before: int = groups[0].get(_MARK, 1)
    done: set[int] = set()
    if before != factor:
        groups[0][_MARK] = factor
        _scale_all(optimizer, schedulers, factor / before, done)
    if (default := defaults.get(_MARK, 1)) != factor:
        defaults[_MARK] = factor
        _scale(defaults, _IN_GROUPS, factor / default, done)
    return before


def _scale_all(
    optimizer: Optimizer, schedulers: Iterable[Any], factor: float, done: set[int]
) -> None:
    for group in optimizer.param_groups:
        _scale(group, _IN_GROUPS, factor, done)
    seen: dict[int, Any] = {}
    for scheduler in schedulers:
        seen |= {
            id(value): value
            for value in _nested(scheduler)
            if getattr(value, "optimizer", optimizer) is optimizer
        }
    for value in seen.values():
        _scale(vars(value), _IN_SCHEDULERS, factor, done)


def _scale(values: dict[str, Any], names: Iterable[str], factor: float, done: set[int]) -> None:
    for name in names:
        if values.get(name) is not None:
            values[name] = _times(values[name], factor, done)


def _times(value: Any, factor: float, done: set[int]) -> Any:
    """Return ``value * factor``. Tensors are changed in place, each once.

    Args:
        done: ids of multiplied tensors; parameter groups may share the optimizer's tensor.
    """
    if isinstance(value, list | tuple):
        return type(value)(_times(rate, factor, done) for rate in value)
    if isinstance(value, torch.Tensor):
        if id(value) not in done:
            done.add(id(value))
            value.mul_(factor)  # in place: a captured or compiled step reads this tensor
        return value
    return value * factor


def _nested(scheduler: Any) -> Iterator[Any]:
    """Yield a scheduler and the schedulers in its attributes, as SequentialLR has them."""
    yield scheduler
    for value in vars(scheduler).values() if hasattr(scheduler, "__dict__") else ():
        for inner in value if isinstance(value, list | tuple) else (value,):
            if isinstance(inner, torch.optim.lr_scheduler.LRScheduler):
                yield from _nested(inner)
