"""Trainings with PowerSGD on two ranks."""

import io
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import geartrain as gt
from geartrain_bagua import BaguaStrategy
from geartrain_bagua.algorithms.power_sgd import PowerSGD

STEPS, BATCH, LEARNING_RATE = 6, 4, 0.2


def net() -> nn.Module:
    torch.manual_seed(5)
    layers = [
        nn.Conv2d(4, 8, 3),
        nn.Flatten(),
        nn.Linear(72, 20),
        nn.Tanh(),
        nn.Linear(20, 9),
        nn.Tanh(),
        nn.Linear(9, 2),
    ]
    return nn.Sequential(*layers).double()


def data() -> TensorDataset:
    torch.manual_seed(6)
    x = torch.randn(2 * BATCH * STEPS, 4, 5, 5, dtype=torch.float64)
    return TensorDataset(x, torch.stack([x.mean((1, 2, 3)), x.std((1, 2, 3))], 1))


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


class Model(gt.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def training_step(self, batch, batch_idx):
        return loss_of(self.net, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


class Counting(PowerSGD):
    """Records the length of each tensor that is all-reduced."""

    def set_up(self, context):
        super().set_up(context)
        self.sent = []

    def _mean_of(self, flat):
        self.sent.append(flat.numel())
        super()._mean_of(flat)


def trained(
    algorithm,
    first: int = 0,
    last: int = STEPS,
    weights: dict[str, torch.Tensor] | None = None,
    bucket_bytes: int = 400,
):
    """Train from step ``first`` to ``last``, from ``weights``; return the algorithm and weights."""
    strategy = BaguaStrategy(algorithm=algorithm, bucket_bytes=bucket_bytes)
    options = {
        "accelerator": "cpu",
        "devices": 2,
        "precision": "64-true",
        "enable_progress_bar": False,
        "max_epochs": 1,
    }
    trainer = gt.Trainer(strategy=strategy, **options)
    model = Model()
    if weights is not None:
        model.net.load_state_dict(weights)
    part = Subset(data(), range(2 * BATCH * first, 2 * BATCH * last))
    trainer.fit(model, DataLoader(part, batch_size=BATCH, shuffle=False))
    return strategy.algorithm, {
        name: value.clone() for name, value in model.net.state_dict().items()
    }


def resumed(ranks: int = 2) -> dict[str, Any]:
    """Train half of the steps, and the rest with a new algorithm that loads the saved state."""
    algorithm, weights = trained(PowerSGD(), 0, STEPS // 2)
    file = io.BytesIO()
    torch.save({**algorithm.state_dict(), "ranks": ranks}, file)
    file.seek(0)
    second = PowerSGD()
    second.load_state_dict(torch.load(file, weights_only=True))
    assert second.state_dict()["steps"] == STEPS // 2
    algorithm, weights = trained(second, STEPS // 2, STEPS, weights)
    return {"weights": weights, "state": algorithm.state_dict()}


CASES = {
    "rank 2": {},
    "rank 1": {"matrix_rank": 1},
    "warm-up": {"warmup_steps": 3},
    "all warm-up": {"warmup_steps": 99},
}


def train_each_case() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in CASES.items():
        algorithm, weights = trained(Counting(**options))
        found[name] = {"weights": weights, "sent": algorithm.sent, "state": algorithm.state_dict()}
    found["one bucket"] = {"weights": trained(PowerSGD(), bucket_bytes=2**20)[1]}
    found["resumed"] = resumed()
    found["resumed elsewhere"] = resumed(ranks=3)
    return found
