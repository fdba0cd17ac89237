"""Train a module with the plugin, on two ranks in this process."""

from __future__ import annotations

import geartrain as gt
import pytest
import torch
from geartrain.testing import RankResult, run_plugin


class Slope(gt.Module):
    """A weight whose gradient is 2 on rank 0 and 4 on rank 1; the strategy's mean is 3."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return ((2 + 2 * self.global_rank) * self.weight).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def fit(**options: object) -> list[RankResult]:
    """Train four steps with the plugin, chosen by its name, and return each rank's result."""
    return run_plugin(
        "mine",
        module=Slope(),
        max_steps=4,
        plugin_options={"mine": options},
    )


def test_logs_the_norm() -> None:
    first, _ = fit()
    norms = {step: found["grad_norm"] for step, found in first.logged.items()}
    assert norms == {1: 3.0, 2: 3.0, 3: 3.0, 4: 3.0}


def test_every() -> None:
    first, _ = fit(every=2)
    assert [step for step, found in first.logged.items() if "grad_norm" in found] == [1, 3]


def test_training_is_the_same() -> None:
    for rank in fit():
        assert rank.module.get_parameter("weight").item() == -12.0


def test_wrong_options_are_refused() -> None:
    with pytest.raises(gt.UsageError, match="every=0"):
        fit(every=0)
