"""A strategy that averages no sparse gradients refuses them before a rank starts."""

import inspect
import re
from importlib.metadata import entry_points

import pytest
import torch
from regression import Net, one_trainer, samples
from torch import nn
from torch.utils.data import DataLoader

import geartrain as gt

#: Strategies that train tables with sparse gradients.
TRAIN_THEM = {"single", "dp", "horovod"}
#: All others.
STRATEGIES = sorted({e.name for e in entry_points(group="geartrain.strategies")} - TRAIN_THEM)
#: Those that start a process also for one rank.
START_PROCESSES = {"ddp_spawn", "spawn", "elastic", "deepspeed"}
OPTIONS = {"tensor_parallel": {"colwise": ["first"]}}
#: All layers that may have sparse gradients.
TABLES = [
    cls
    for cls in (getattr(nn, name) for name in dir(nn))
    if isinstance(cls, type) and "sparse" in inspect.signature(cls.__init__).parameters
]


def test_a_new_layer_with_sparse_gradients_is_noticed():
    assert {cls.__name__ for cls in TABLES} == {"Embedding", "EmbeddingBag"}


@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_table_with_sparse_gradients_is_refused(strategy, automatic):
    if strategy == "deepspeed":
        pytest.importorskip("deepspeed")
    if strategy in ("deepspeed", "ddp2") and not automatic:
        pytest.skip("manual optimisation is refused first")
    for cls in TABLES:
        module = Net()
        module.automatic_optimization = automatic
        module.items = cls(8, 3, sparse=True)
        message = f"]: items is {cls.__name__}(sparse=True)"
        with pytest.raises(gt.UsageError, match=re.escape(message)):
            one_trainer(strategy=strategy, strategy_options=OPTIONS.get(strategy), devices=2).fit(
                module, DataLoader(samples(), 6)
            )


class InSetup(Net):
    """Makes its table when the ranks have started."""

    def setup(self, stage):
        self.items = nn.Embedding(8, 3, sparse=True)


class Unfrozen(Net):
    """Trains its table when the ranks have started."""

    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(8, 3, sparse=True).requires_grad_(False)

    def setup(self, stage):
        self.items.requires_grad_(True)


@pytest.mark.parametrize("make", [InSetup, Unfrozen])
@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s not in START_PROCESSES])
def test_a_table_is_refused_that_the_modules_setup_makes(strategy, make):
    one = one_trainer(strategy=strategy, strategy_options=OPTIONS.get(strategy))
    with pytest.raises(gt.UsageError, match=r"]: items is Embedding\(sparse=True\)"):
        one.fit(make(), DataLoader(samples(), 6))


class Functional(Net):
    """Produce a sparse gradient outside ``nn.Embedding``."""

    def training_step(self, batch, batch_idx):
        rows = nn.functional.embedding(torch.arange(3), self.first.weight, sparse=True)
        return rows.square().mean()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor_parallel"])
def test_torchs_error_for_a_sparse_gradient_gets_the_fix(strategy):
    one = one_trainer(strategy=strategy, strategy_options=OPTIONS.get(strategy))
    with pytest.raises((NotImplementedError, gt.TrainingError)) as raised:
        one.fit(Functional(), DataLoader(samples(), 6))
    texts = [str(raised.value), *raised.value.__notes__]
    assert any("Fix: sparse=False in nn.Embedding" in text for text in texts)
