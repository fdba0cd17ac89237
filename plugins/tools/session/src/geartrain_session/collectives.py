"""Reductions over ranks of the tensors in nested data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from geartrain import Run, TrainingError, UsageError
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


def all_reduce(run: Run, data: Any, reduce_op: str) -> Any:
    """Return ``data`` with each tensor and number reduced over ranks.

    Raises:
        TrainingError: a tensor has other shapes on other ranks.
        UsageError: ``reduce_op`` is unknown.
    """
    if reduce_op not in _REDUCTIONS:
        raise UsageError(
            f"all_reduce: reduce_op={reduce_op!r}. Fix: use one of {', '.join(_REDUCTIONS)}"
        )
    tensors: list[torch.Tensor] = []
    map_tensors(data, lambda tensor: tensors.append(tensor.detach()), run.device)
    reduced = (_reduce(gathered, reduce_op) for gathered in run.coordinator.gather(run, tensors))
    return map_tensors(data, lambda _: next(reduced), run.device)


def _reduce(gathered: torch.Tensor | list[torch.Tensor], reduce_op: str) -> torch.Tensor:
    if isinstance(gathered, list):
        raise TrainingError(
            f"all_reduce: ranks have the shapes {[list(part.shape) for part in gathered]}. "
            "Fix: use the same shape on every rank, or all_gather"
        )
    return _REDUCTIONS[reduce_op](gathered)


def mean_of_metrics(run: Run, values: Mapping[str, float]) -> Mapping[str, float]:
    """Return the mean over ranks of each number.

    Raises:
        TrainingError: ranks log different names.
    """
    if run.world.size == 1:
        return values
    means, _, _ = run.coordinator.reduce(
        run, {name: LocalMetric(_MEAN, value, 1, None, [value]) for name, value in values.items()}
    )
    return means
