"""A rank that starts again has attributes which no checkpoint contains."""

import pickle
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
        self.old_random, self.late_array, self.late_random = numpy.random.RandomState(1), None, None
        self.pair, self.arrays, self.mean_loss = {"x": torch.zeros(1), "n": 0}, [numpy.ones(2)], 0.0
        self.current, self.previous = torch.zeros(1), torch.ones(1)
        self.rows, self.output = self.layer.weight[1:], torch.zeros(2)

    def change(self):
        self.mean += 1
        self.number, self.names, self.hidden = 2.0, ["a"], torch.ones(2)
        self.meter.total += 3
        self.array += 1
        self.layer.weight.requires_grad_(False)
        self.late_array, self.late_random = numpy.ones(2), random.Random(2)
        self.pair["n"] += 1
        self.arrays[0] += 1
        self.mean_loss += numpy.float64(0.5)
        self.current, self.previous = self.previous, self.current
        with torch.no_grad():
            self.layer.bias += 1
            self.layer.weight += 1
        with torch.inference_mode():
            self.output = torch.ones(2)
        self.drawn()

    def drawn(self):
        return (
            self.generators.random(),
            torch.rand(1, generator=self.torch_random).item(),
            self.numpy_random.random(),
            self.old_random.random_sample(),
        )


def run_of(module):
    return SimpleNamespace(module=module, hooks=SimpleNamespace(parts=[]))


def restored(changed, attributes):
    """Return a new module with the attributes of one that has changed."""
    fresh = Net()
    fresh.load_state_dict(changed.state_dict())
    others = fresh.meter, fresh.generators
    Attributes(run_of(fresh)).restore(pickle.loads(pickle.dumps(attributes.state())))
    # What others may refer to is the same object.
    assert (fresh.meter, fresh.generators) == others
    assert fresh.tied[0] is fresh.layer.weight
    assert fresh.rows.data_ptr() == fresh.layer.weight[1:].data_ptr()
    return fresh


def test_data_generators_and_what_is_frozen_are_those_of_the_other_rank():
    changed = Net()
    attributes = Attributes(run_of(changed))
    changed.change()
    fresh = restored(changed, attributes)
    assert (fresh.number, fresh.names, fresh.hidden.tolist()) == (2.0, ["a"], [1.0, 1.0])
    assert (fresh.mean.tolist(), fresh.array.tolist()) == ([1.0, 1.0], [1.0, 1.0])
    assert (fresh.meter.total, fresh.layer.weight.requires_grad) == (3, False)
    assert fresh.layer.bias.requires_grad
    assert fresh.drawn() == changed.drawn()
    assert (fresh.mean_loss, fresh.output.tolist()) == (0.5, [1.0, 1.0])


def test_data_whose_tensors_are_those_of_the_beginning_may_differ():
    changed = Net()
    attributes = Attributes(run_of(changed))
    changed.change()
    fresh = restored(changed, attributes)
    assert fresh.pair == {"x": torch.zeros(1), "n": 1}
    assert (fresh.current.item(), fresh.previous.item()) == (1.0, 0.0)


def test_arrays_and_generators_of_lists_and_later_ones_keep_their_types():
    changed = Net()
    attributes = Attributes(run_of(changed))
    changed.change()
    fresh = restored(changed, attributes)
    assert isinstance(fresh.late_array, numpy.ndarray)
    assert fresh.late_random.random() == changed.late_random.random()
    assert fresh.arrays[0].tolist() == [2.0, 2.0]


def test_tensors_and_arrays_that_have_not_changed_are_left_out():
    net = Net()
    attributes = Attributes(run_of(net))
    assert not {"data", "array", "arrays", "tied"} & attributes.state()[""].keys()
    net.data += 1
    net.array += 1
    saved = attributes.state()[""]
    assert (saved["data"].tolist(), saved["array"].tolist()) == ([1.0, 1.0, 1.0], [1.0, 1.0])
