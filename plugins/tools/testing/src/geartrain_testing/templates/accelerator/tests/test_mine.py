"""Train a module on the accelerator; without a device it gives the reason."""

from __future__ import annotations

import geartrain as gt
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from geartrain_mine.accelerator import COUNT


class Line(gt.Module):
    """Fits y = 3x, and records the number of threads of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.threads: set[int] = set()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.threads.add(torch.get_num_threads())
        loss: torch.Tensor = (self.net(batch[0]) - batch[1]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two devices."""
    monkeypatch.setenv(COUNT, "2")


def trainer(threads: int = 1) -> gt.Trainer:
    return gt.Trainer(
        accelerator="mine",
        accelerator_options={"threads": threads},
        devices=[1],
        max_epochs=30,
        enable_progress_bar=False,
    )


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("threads", [1, 2])
def test_trains_with_its_threads_and_restores_the_number(threads: int) -> None:
    before = torch.get_num_threads()
    x = torch.linspace(-1, 1, 32).unsqueeze(1)
    module = Line()
    trainer(threads).fit(module, DataLoader(TensorDataset(x, 3 * x), batch_size=8))
    assert module.net.weight.item() == pytest.approx(3, abs=0.01)
    assert module.threads == {threads}
    assert torch.get_num_threads() == before


@pytest.mark.usefixtures("device")
def test_plan() -> None:
    plan = trainer().plan
    assert (plan.accelerator.name, plan.devices) == ("mine", (1,))


@pytest.mark.usefixtures("device")
def test_auto_does_not_take_it() -> None:
    accelerator = gt.Trainer(accelerator="auto", devices=1).plan.accelerator
    assert accelerator.name != "mine"


@pytest.mark.parametrize("count", ["", "0", "many"])
def test_without_a_device_it_is_refused(monkeypatch: pytest.MonkeyPatch, count: str) -> None:
    monkeypatch.setenv(COUNT, count)
    with pytest.raises(gt.UsageError, match=COUNT):
        trainer().plan  # noqa: B018


@pytest.mark.usefixtures("device")
def test_wrong_options_are_refused() -> None:
    with pytest.raises(gt.UsageError, match="threads=0"):
        trainer(threads=0)
