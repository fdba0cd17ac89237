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
#: In the first parameter group: by what its optimizer's rates are multiplied already. It goes with the optimizer's state into checkpoints:
#: what one of them holds, or what ``configure_optimizers`` hands out again, is not scaled twice, and follows the number of workers. In the
#: optimizer's ``defaults`` it is, too, which no checkpoint has: a group that comes later takes its rates from there.
_MARK = "geartrain_lr_scale"


def scale(optimizer: Optimizer, schedulers: Iterable[Any], factor: int) -> int:
    """Multiply every learning rate of an optimizer, and those of the schedulers that change it, nested ones included.

    The whole schedule keeps its shape: what it comes to at any step is ``factor`` times what it was. A group that is added later without
    a rate of its own takes the optimizer's default, which is multiplied too.

    Returns:
        What the rates were multiplied by before: 1, or the factor of a call with this optimizer or with the one whose state it has.
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
            id(one): one
            for one in _nested(scheduler)
            if getattr(one, "optimizer", optimizer) is optimizer
        }
    for one in seen.values():
        _scale(vars(one), _IN_SCHEDULERS, factor, done)


def _scale(values: dict[str, Any], names: Iterable[str], factor: float, done: set[int]) -> None:
    for name in names:
        if values.get(name) is not None:
            values[name] = _times(values[name], factor, done)


def _times(value: Any, factor: float, done: set[int]) -> Any:
    """``done``: ids of tensors that are multiplied already; groups that were given none of their own share the optimizer's."""
    if isinstance(value, list | tuple):
        return type(value)(_times(one, factor, done) for one in value)
    if isinstance(value, torch.Tensor):
        if id(value) not in done:
            done.add(id(value))
            value.mul_(factor)  # in place: a captured or compiled step reads this very tensor
        return value
    return value * factor


def _nested(scheduler: Any) -> Iterator[Any]:
    """A scheduler and those that it holds, as SequentialLR and ChainedScheduler do, or one of the user's own."""
    yield scheduler
    for value in vars(scheduler).values() if hasattr(scheduler, "__dict__") else ():
        for inner in value if isinstance(value, list | tuple) else (value,):
            if isinstance(inner, torch.optim.lr_scheduler.LRScheduler):
                yield from _nested(inner)
