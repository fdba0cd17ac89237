"""Weights that a hook sets at random, when ranks have parts of them, are those of one process."""

import re

import pytest
import torch
from regression import Net, one_trainer, samples
from several_ranks import results
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from geartrain_sharded.drawn import DRAWS

from .cases import UNITS

pytestmark = pytest.mark.timeout(120)

WAYS = {
    "fsdp": UNITS,
    "ddp_sharded": {},
    "tensor_parallel": {"colwise": ["first"], "rowwise": ["second"]},
}
#: Operations that draw other things than weights. On a CPU those of dropout draw by bernoulli_.
OTHERS = {"alpha_dropout_", "dropout_", "feature_alpha_dropout_", "feature_dropout_"}
OTHERS |= {"rrelu_", "rrelu_with_noise_"}


def draw(name, weight):
    if name in dir(nn.init):
        getattr(nn.init, name)(weight)
    elif name == "bernoulli":
        weight.copy_(torch.bernoulli(torch.full_like(weight, 0.25)))
    elif name.endswith("_like"):
        options = (5,) if name == "randint_like" else ()
        weight.copy_(getattr(torch, name)(weight, *options))
    else:
        options = (0.5,) if name == "geometric_" else (0, 9) if name == "random_" else ()
        getattr(weight, name)(*options)


class Drawn(Net):
    def __init__(self, names):
        super().__init__()
        self.names = names

    @torch.no_grad()
    def on_train_start(self):
        for name in self.names:
            for layer in (self.first, self.second):
                draw(name, layer.weight)
            self.log_norms(name)

    def log_norms(self, name):
        wholes = (getattr(p, "full_tensor", p.clone)() for p in self.parameters())
        self.seen = {**getattr(self, "seen", {}), name: [whole.tolist() for whole in wholes]}


def train_drawn(strategy, options, devices, names):
    module = Drawn(names)
    trainer = one_trainer(
        strategy=strategy, strategy_options=options, devices=devices, seed=3, max_steps=1
    )
    trainer.fit(module, DataLoader(samples(), 6))
    return module.seen


INITS = ["normal_", "uniform_", "trunc_normal_", "kaiming_normal_", "xavier_uniform_"]


@pytest.mark.parametrize("way", WAYS)
def test_weights_that_a_hook_draws_are_those_of_one_process(tmp_path, way):
    names = sorted({*DRAWS, *INITS})
    alone = train_drawn("single", None, 1, names)
    for of_rank in results(tmp_path, train_drawn, way, WAYS[way], 2, names):
        for name in names:
            assert of_rank[name] == alone[name], name


def test_each_operation_of_torch_that_draws_is_known():
    names = {schema.name.removeprefix("aten::") for schema in torch._C._jit_get_all_schemas()}
    drawing = set()
    for name in names:
        if hasattr(torch.ops.aten, name) and re.fullmatch(r"[a-z].*(_|_like)", name):
            packet = getattr(torch.ops.aten, name)
            tags = [tag for each in packet.overloads() for tag in getattr(packet, each).tags]
            drawing |= {name} if torch.Tag.nondeterministic_seeded in tags else set()
    in_parts = {operation.overloadpacket.__name__ for operation in torch_draws_in_parts()}
    assert drawing | in_parts == {*DRAWS, *OTHERS}


def torch_draws_in_parts():
    """Return the operations on DTensors for which torch lets each rank draw its part."""
    not_on_a_cpu = {torch.ops.aten.native_dropout.default}
    without_tensor = {torch.ops.aten.rand.default, torch.ops.aten.randn.default}
    return DTensor._op_dispatcher._random_ops - not_on_a_cpu - without_tensor
