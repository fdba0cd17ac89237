"""Learning rates times the number of workers.

The gradient of N workers is the mean over N times as many samples, and so may take a step N times as long: Goyal et al. 2017,
https://arxiv.org/abs/1706.02677.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

#: Where a parameter group keeps learning rates: of every optimizer, of CyclicLR and OneCycleLR, of SWALR.
_IN_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr", "base_lr", "swa_lr")
#: Where a scheduler does: all of them; CyclicLR; ReduceLROnPlateau, whose old name for it is the second; the cosine ones.
_IN_SCHEDULERS = ("base_lrs", "_last_lr", "max_lrs", "min_lrs", "default_min_lr", "eta_min")
#: On an optimizer that was scaled: one that ``configure_optimizers`` hands out again must not be scaled twice.
_MARK = "_geartrain_lr_scale"


def scale(optimizer: Optimizer, schedulers: Iterable[Any], factor: float) -> None:
    """Multiply every learning rate of an optimizer, and those of the schedulers that change it, nested ones included.

    The whole schedule keeps its shape: what it comes to at any step is ``factor`` times what it was.
    """
    if getattr(optimizer, _MARK, 1.0) == factor:
        return
    factor, before = factor / getattr(optimizer, _MARK, 1.0), factor
    for group in optimizer.param_groups:
        _scale(group, _IN_GROUPS, factor)
    seen: dict[int, Any] = {}
    for scheduler in schedulers:
        seen |= {id(one): one for one in _nested(scheduler) if getattr(one, "optimizer", optimizer) is optimizer}
    for one in seen.values():
        _scale(vars(one), _IN_SCHEDULERS, factor)
    setattr(optimizer, _MARK, before)


def rescale(optimizer: Optimizer, schedulers: Iterable[Any], before: float, factor: float) -> None:
    """Where learning rates came from a state in which they were ``before`` times what was configured: make them ``factor`` times that."""
    setattr(optimizer, _MARK, before)
    scale(optimizer, schedulers, factor)


def _scale(values: dict[str, Any], names: Iterable[str], factor: float) -> None:
    for name in names:
        if values.get(name) is not None:
            values[name] = _times(values[name], factor)


def _times(value: Any, factor: float) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_times(one, factor) for one in value)
    if isinstance(value, torch.Tensor):
        return value.mul_(factor)  # in place: a captured or compiled step reads this very tensor
    return value * factor


def _nested(scheduler: Any) -> Iterator[Any]:
    """A scheduler and those that it holds, as SequentialLR and ChainedScheduler do, or one of the user's own."""
    yield scheduler
    for value in vars(scheduler).values() if hasattr(scheduler, "__dict__") else ():
        for inner in value if isinstance(value, list | tuple) else (value,):
            if isinstance(inner, torch.optim.lr_scheduler.LRScheduler):
                yield from _nested(inner)
