"""Groups of parameters that an optimizer gets during training, and the schedulers of its rates.

torch's schedulers keep a base rate for each group that the optimizer had when they were made.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from geartrain import UsageError
from geartrain.plugin_api import parameters_of

#: The errors of an optimizer or scheduler that has no settings for a group.
_UNPREPARED = (AssertionError, IndexError, KeyError, RuntimeError, ValueError)


@contextmanager
def following(schedulers: Sequence[Any]) -> Iterator[None]:
    """Let schedulers know the groups that are added inside, and those whose rate is set inside.

    The rate of such a group keeps its share of the first group's, as if it always had it.
    """
    parts = [part for scheduler in schedulers for part in _parts(scheduler)]
    before = [[group["lr"] for group in part.optimizer.param_groups] for part in parts]
    yield
    for part, rates in zip(parts, before, strict=True):
        (first, *others), bases = part.optimizer.param_groups, part.base_lrs
        for index, group in enumerate(others, 1):
            if index < len(rates) and group["lr"] == rates[index]:
                continue
            factors = getattr(part, "lr_lambdas", [])
            if index == len(bases) and all(factor is factors[0] for factor in factors):
                factors += factors[:1]  # LambdaLR's: one function for all groups
            base = group["lr"] * bases[0] / first["lr"] if first["lr"] else group["lr"]
            bases[index : index + 1] = [base]


def _parts(scheduler: Any) -> Iterator[Any]:
    """Yield the schedulers inside SequentialLR and ChainedScheduler, or the scheduler itself."""
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _parts(part)
    if isinstance(scheduler, LRScheduler) and hasattr(scheduler, "base_lrs"):
        yield scheduler


def check_optimizer(owner: str, optimizer: Optimizer, later: Sequence[nn.Parameter]) -> None:
    """Refuse an optimizer that cannot step parameters which it gets later.

    It steps a new optimizer of the class with small parameters: no attribute says what it can step.

    Raises:
        UsageError: it cannot, as Muon, which takes matrices alone.
    """
    small = [_small(parameter) for parameter in later]
    for parameter in small:
        parameter.grad = torch.ones_like(parameter)
    try:
        first = [_small(parameter) for parameter in parameters_of([optimizer])[:1]]
        group = {**optimizer.param_groups[0], "params": first}
        alike: Any = type(optimizer)([group])  # type: ignore[call-arg]
        alike.add_param_group({"params": small})
    except (TypeError, ValueError):  # the class has other arguments, so no trial can be made
        return
    try:
        alike.step(lambda: torch.zeros(()))
    except TypeError:  # it takes no closure
        return
    except _UNPREPARED as error:
        raise _refusal(owner, optimizer, error, "optimizer, such as AdamW") from error


def check_scheduler(owner: str, scheduler: Any, added: int) -> None:
    """Refuse a scheduler that fails if its optimizer has more groups than it knows.

    It steps a copy of the scheduler: no attribute says how many groups it can have.

    Args:
        added: groups that the optimizer will get.

    Raises:
        UsageError: it fails, as OneCycleLR, which keeps its settings in the groups.
    """
    for part in _parts(scheduler):
        trial = copy.copy(part)
        vars(trial).update({n: list(v) for n, v in vars(part).items() if isinstance(v, list)})
        groups = [{**group, "params": []} for group in part.optimizer.param_groups]
        trial.optimizer = SimpleNamespace(param_groups=copy.deepcopy(groups))
        trial.last_epoch, trial._step_count = 0, 2  # at 1 torch misses the optimizer's step
        with following([trial]):
            new = {**part.optimizer.defaults, "lr": groups[0]["lr"]}
            trial.optimizer.param_groups += [dict(new) for _ in range(added)]
        try:
            trial.step()
        except _UNPREPARED as error:
            fix = "scheduler, such as LambdaLR with one function"
            raise _refusal(owner, part, error, fix) from error


def _small(parameter: torch.Tensor) -> nn.Parameter:
    size = [1] * parameter.ndim
    return nn.Parameter(torch.zeros(size, dtype=parameter.dtype, device=parameter.device))


def _refusal(owner: str, part: object, error: Exception, other: str) -> UsageError:
    return UsageError(
        f"{owner}: {type(part).__name__} takes no group of parameters during training: {error}. "
        f"Fix: another {other}"
    )
