"""Reductions over ranks of the tensors in nested data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from geartrain import Run, UsageError
from geartrain.plugin_api import LocalMetric, MetricOptions, map_tensors

#: The options with which a Session logs the mean over ranks.
_MEAN = MetricOptions(
    prog_bar=False,
    logger=True,
    on_step=True,
    on_epoch=False,
    reduce_fx="mean",
    sync_dist=True,
    rank_zero_only=False,
)
#: ``reduce_op`` -> the reduction of ``[world_size, *shape]``.
_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda t: t.double().mean(0).to(t.dtype if t.is_floating_point() else torch.float32),
    "sum": lambda t: t.sum(0),
    "min": lambda t: t.amin(0),
    "max": lambda t: t.amax(0),
}


def all_gather(run: Run, data: Any) -> Any:
    """Return ``data`` with each tensor of every rank."""
    return map_tensors(data, lambda tensor: run.hooks.all_gather(run=run, tensor=tensor))


def all_reduce(run: Run, data: Any, reduce_op: str) -> Any:
    """Return ``data`` with each tensor reduced over ranks.

    Raises:
        UsageError: ``reduce_op`` is unknown.
    """
    if reduce_op not in _REDUCTIONS:
        raise UsageError(
            f"all_reduce: reduce_op={reduce_op!r}. Fix: use one of {', '.join(_REDUCTIONS)}"
        )
    reduce = _REDUCTIONS[reduce_op]
    return map_tensors(
        data, lambda tensor: reduce(torch.stack(list(run.hooks.all_gather(run=run, tensor=tensor))))
    )


def mean_of_metrics(run: Run, values: Mapping[str, float]) -> Mapping[str, float]:
    """Return the mean over ranks of each number.

    Raises:
        TrainingError: ranks log different names.
    """
    if run.world.size == 1:
        return values
    means, _, _ = run.ranks.reduce(
        run, {name: LocalMetric(_MEAN, value, 1, None, [value]) for name, value in values.items()}
    )
    return means
