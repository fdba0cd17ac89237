"""What a rank that starts again has beside a checkpoint."""

import random
from types import SimpleNamespace

import numpy
import torch
from torch import nn

from geartrain_elastic.attributes import Attributes


class Meter:
    def __init__(self):
        self.total = 0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2), persistent=False)
        self.number, self.names, self.hidden = 1.0, [], torch.zeros(2)
        self.meter, self.array = Meter(), numpy.zeros(2)
        self.data = torch.zeros(3)
        self.tied = [self.layer.weight]
        self.generators = random.Random(1)
        self.torch_random, self.numpy_random = torch.Generator(), numpy.random.default_rng(1)

    def change(self):
        self.mean += 1
        self.number, self.names, self.hidden = 2.0, ["a"], torch.ones(2)
        self.meter.total += 3
        self.array += 1
        self.layer.weight.requires_grad_(False)
        self.drawn()

    def drawn(self):
        return (
            self.generators.random(),
            torch.rand(1, generator=self.torch_random).item(),
            self.numpy_random.random(),
        )


def run_of(module):
    return SimpleNamespace(module=module, hooks=SimpleNamespace(parts=[]))


def test_plain_data_generators_and_what_is_frozen_are_those_of_the_other_rank():
    changed, fresh = Net(), Net()
    attributes = Attributes(run_of(changed))
    changed.change()
    saved = attributes.copies()
    meter, generators = fresh.meter, fresh.generators
    Attributes(run_of(fresh)).restore(saved)
    assert (fresh.number, fresh.names, fresh.hidden.tolist()) == (2.0, ["a"], [1.0, 1.0])
    assert (fresh.mean.tolist(), fresh.array.tolist()) == ([1.0, 1.0], [1.0, 1.0])
    assert (fresh.meter.total, fresh.layer.weight.requires_grad) == (3, False)
    assert fresh.layer.bias.requires_grad
    assert fresh.drawn() == changed.drawn()
    # What others may refer to is the same object.
    assert fresh.meter is meter
    assert fresh.generators is generators
    assert fresh.tied[0] is fresh.layer.weight


def test_tensors_that_have_not_changed_are_not_copied():
    net = Net()
    attributes = Attributes(run_of(net))
    assert not {"data", "tied"} & attributes.copies()[""].keys()
    net.data += 1
    assert attributes.copies()[""]["data"].tolist() == [1.0, 1.0, 1.0]
