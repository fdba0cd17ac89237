"""One rank's part of a metric."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from geartrain.metrics import reductions


@dataclass(frozen=True, slots=True)
class MetricOptions:
    """The options of ``self.log`` for one metric; the same on every call and every rank."""

    prog_bar: bool
    logger: bool
    on_step: bool
    on_epoch: bool
    #: The name of a reduction, or the name of a user's function.
    reduce_fx: str
    sync_dist: bool
    rank_zero_only: bool
    #: The module's path of another library's object that has the value; "" if it is no submodule.
    #: ``None`` if numbers were logged, and in a call's options.
    path: str | None = None


@dataclass(slots=True)
class LocalMetric:
    """This rank's part of one metric."""

    spec: MetricOptions
    #: A sum for a mean, else the reduced value.
    total: float = 0.0
    weight: int = 0
    #: The user's own reduction, and the values that it gets.
    function: Callable[[torch.Tensor], object] | None = None
    samples: list[float] = field(default_factory=list)

    def value(self, name: str) -> float:
        """Return the metric's value on this rank alone.

        Raises:
            TrainingError: the user's function returns something else than one number.
        """
        if self.function is not None:
            return reductions.apply(name, self.function, self.samples)
        return reductions.value(self.spec.reduce_fx, [self.total], [self.weight])
