"""What the plugin logs while a module trains."""

from __future__ import annotations

from collections.abc import Mapping

import geartrain as gt
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset


class Slope(gt.Module):
    """Its one weight falls by its gradient, which is 3 in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return (3 * self.weight).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Kept:
    """A logger: metrics by step."""

    def __init__(self) -> None:
        self.metrics: dict[int, dict[str, float]] = {}

    @gt.hookimpl
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.metrics.setdefault(step, {}).update(metrics)


def fit(**options: object) -> tuple[Slope, dict[int, dict[str, float]]]:
    """Train four steps with the plugin, chosen by its name; the module, and what was logged by step."""
    module, kept = Slope(), Kept()
    loader = DataLoader(TensorDataset(torch.zeros(4, 1)), batch_size=1)
    trainer = gt.Trainer(
        plugins=["mine", kept],
        plugin_options={"mine": options},
        max_epochs=1,
        log_every_n_steps=1,
        enable_progress_bar=False,
    )
    trainer.fit(module, loader)
    return module, kept.metrics


def test_logs_the_norm() -> None:
    _, metrics = fit()
    assert {step: found["grad_norm"] for step, found in metrics.items()} == {1: 3.0, 2: 3.0, 3: 3.0, 4: 3.0}


def test_every() -> None:
    _, metrics = fit(every=2)
    assert [step for step, found in metrics.items() if "grad_norm" in found] == [1, 3]


def test_training_is_the_same() -> None:
    module, _ = fit()
    assert module.weight.item() == -12.0


def test_wrong_options_are_refused() -> None:
    with pytest.raises(gt.UsageError, match="every=0"):
        fit(every=0)
