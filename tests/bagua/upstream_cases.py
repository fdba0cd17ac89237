"""Train the cases with Bagua's test net, data and optimizers on two ranks."""

import torch
from torch import nn
from torch.utils.data import DataLoader

import geartrain as gt

#: Steps of one rank.
STEPS = 32
LEARNING_RATE, QADAM = 0.1, {"lr": 0.05, "warmup_steps": 20}
FLAT = {"hierarchical": False}
#: Case -> algorithm, its options, and True if each rank has its own shard (else all have rank 0's).
CASES = {
    # As in Bagua's tests: default options, and the data of rank 0 on every rank.
    "gradient_allreduce": ("gradient_allreduce", {}, False),
    "bytegrad": ("bytegrad", {}, False),
    "qadam": ("qadam", {}, False),
    "decentralized": ("decentralized", {}, False),
    "low_precision_decentralized": ("low_precision_decentralized", {}, False),
    "async": ("async", {"warmup_steps": 10, "sync_interval_ms": 10}, False),
    # Each rank has its own data, so the results depend on the averaging.
    "gradient_allreduce of shards": ("gradient_allreduce", {}, True),
    "bytegrad of shards": ("bytegrad", FLAT, True),
    "qadam of shards": ("qadam", FLAT, True),
    "qadam of shards, hierarchical": ("qadam", {}, True),
    "decentralized of shards": ("decentralized", FLAT, True),
    "low_precision_decentralized of shards": ("low_precision_decentralized", FLAT, True),
    "async of shards": ("async", {"sync_interval_ms": 5}, True),
}


def seeded() -> tuple[nn.Linear, torch.Tensor]:
    """Return the layer ``[32, 32]`` and the data ``[64, 32]`` of Bagua's test."""
    torch.manual_seed(13)
    nn.Linear(32, 2)  # Bagua's base class makes it first; it advances the random numbers
    layer = nn.Linear(32, 32)
    return layer, torch.randn(64, 32)


def order() -> list[int]:
    """Return the order of samples in the first epoch of a DistributedSampler with shuffling."""
    return torch.randperm(64, generator=torch.Generator().manual_seed(0)).tolist()


def loss_of(layer: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    predicted = layer(batch)
    return nn.functional.mse_loss(predicted, torch.ones_like(predicted))


class Upstream(gt.Module):
    """A linear layer that learns to return ones."""

    def __init__(self, qadam: bool = False) -> None:
        super().__init__()
        self.layer, _ = seeded()
        self.qadam = qadam

    def training_step(self, batch, batch_idx):
        return loss_of(self.layer, batch)

    def configure_optimizers(self):
        if self.qadam:
            from geartrain.strategies import QAdamOptimizer

            return QAdamOptimizer(self.layer.parameters(), **QADAM)
        return torch.optim.SGD(self.layer.parameters(), lr=LEARNING_RATE)


def train(
    strategy, devices: int, sampler: list[int], sharded: bool, qadam: bool = False
) -> tuple[gt.Trainer, dict[str, torch.Tensor]]:
    """Train for one epoch; return the trainer and this rank's weights."""
    module = Upstream(qadam)
    loader = DataLoader(seeded()[1], batch_size=1, sampler=sampler)
    trainer = gt.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=1,
        enable_progress_bar=False,
        use_distributed_sampler=sharded,
    )
    trainer.fit(module, loader)
    return trainer, {name: tensor.clone() for name, tensor in module.layer.state_dict().items()}


def train_cases(*names: str, devices: int = 2) -> dict[str, dict[str, torch.Tensor]]:
    """Train all cases, or those with these names; return the weights of each."""
    from geartrain.strategies import BaguaStrategy

    found = {}
    for case in names or CASES:
        algorithm, options, sharded = CASES[case]
        strategy = BaguaStrategy(algorithm=algorithm, **options)
        sampler = order() if sharded else order()[0::2]
        _, found[case] = train(strategy, devices, sampler, sharded, algorithm == "qadam")
    return found


def train_on_one_device(case: str) -> dict[str, dict[str, torch.Tensor]]:
    """Train a case on one device of each node."""
    return train_cases(case, devices=1)
