"""A strategy that averages no sparse gradients refuses them before a rank starts."""

import inspect
import re
from importlib.metadata import entry_points

import pytest
from regression import Net, one_trainer, samples
from torch import nn
from torch.utils.data import DataLoader

import geartrain as gt

#: Strategies that train tables with sparse gradients.
TRAIN_THEM = {"single", "dp", "ddp2", "horovod"}
#: All layers that may have sparse gradients.
TABLES = [
    cls
    for cls in (getattr(nn, name) for name in dir(nn))
    if isinstance(cls, type) and "sparse" in inspect.signature(cls.__init__).parameters
]


def test_a_new_layer_with_sparse_gradients_is_noticed():
    assert {cls.__name__ for cls in TABLES} == {"Embedding", "EmbeddingBag"}


@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.parametrize(
    "strategy", sorted({e.name for e in entry_points(group="geartrain.strategies")} - TRAIN_THEM)
)
def test_a_table_with_sparse_gradients_is_refused(strategy, automatic):
    if strategy == "deepspeed":
        pytest.importorskip("deepspeed")
        if not automatic:
            pytest.skip("manual optimisation is refused first")
    for cls in TABLES:
        module = Net()
        module.automatic_optimization = automatic
        module.items = cls(8, 3, sparse=True)
        options = {"tensor_parallel": {"colwise": ["first"]}}.get(strategy)
        message = f"]: items is {cls.__name__}(sparse=True)"
        with pytest.raises(gt.UsageError, match=re.escape(message)):
            one_trainer(strategy=strategy, strategy_options=options, devices=2).fit(
                module, DataLoader(samples(), 6)
            )
