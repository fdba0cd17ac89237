"""Compiled networks: inductor's code on the device, against the same steps without it."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from .device import ON_DEVICE, Net, assert_equal, fit, loader, trainer

pytestmark = ON_DEVICE


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Deep(Net):
    """Three equal blocks in front of the network."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block(), Block())

    def forward(self, x):
        return self.net(self.blocks(x))


REGIONS = {"plugins": ["compile"], "plugin_options": {"compile": {"regions": ["Block"]}}}
WHOLE = {"plugins": ["compile"]}
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def _compiles_anew():
    torch._dynamo.reset()
    counters.clear()


def test_regions_are_compiled_once_and_have_the_same_result():
    assert_equal(fit(Deep(), **REGIONS), fit(Deep()), **CLOSE)
    # Equal blocks share a graph; the input of the first one needs no gradient.
    assert counters["stats"]["unique_graphs"] == 2
    assert counters["inductor"], "inductor compiled nothing"


@pytest.mark.parametrize(("first", "second"), [(WHOLE, {}), ({}, WHOLE)])
def test_a_checkpoint_crosses_compiled_and_not(tmp_path, first, second):
    fit(Deep(), max_epochs=1, output=tmp_path, **first)
    resumed, one = Deep(), trainer(output=tmp_path, **second)
    one.fit(resumed, loader(), ckpt_path="last")
    assert one.global_step == 16
    assert_equal(resumed, fit(Deep()), **CLOSE)
