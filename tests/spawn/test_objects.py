"""A rank that starts again has the objects of the rank before it, and the same of them are one."""

import itertools
import random
import threading
from argparse import Namespace
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

from geartrain import TrainingError
from geartrain_elastic.strategy import in_checkpoints
from geartrain_spawn.objects import RankObjects, restore

DTYPES = sorted({t for t in vars(torch).values() if isinstance(t, torch.dtype)}, key=str)
BITS = sorted(numpy.random.BitGenerator.__subclasses__(), key=str)
CONTAINERS = (list, dict, set, deque, OrderedDict, Counter, UserDict, UserList)
CONTAINERS += (lambda: defaultdict(list), SimpleNamespace, Namespace)


class Meter:
    def __init__(self):
        self.total = 0


@dataclass(slots=True)
class Slots:
    count: int = 0


class Net(nn.Module):
    """Its attributes are those of ``make(self)``."""

    def __init__(self, make=None):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2), persistent=False)
        self.register_buffer("kept", torch.zeros(2))
        if make is not None:
            make(self)


def run_of(module, *plugins):
    info = SimpleNamespace(kind="plugin", distribution=None, name="watch")
    parts = [SimpleNamespace(info=info, plugin=plugin) for plugin in plugins]
    return SimpleNamespace(
        module=module,
        hooks=SimpleNamespace(parts=parts),
        trainer=object(),
        plan=SimpleNamespace(strategy=SimpleNamespace(label="elastic")),
        optimizers=[],
        schedulers=[],
    )


def objects_of(module, *plugins):
    return RankObjects(run_of(module, *plugins), partial(in_checkpoints, module))


def taken_over(make, change, watch=None):
    """Return a rank's module that has changed, and that of the rank that starts again.

    Args:
        make: sets the module's attributes, in both.
        change: called with the module, and with the plugin that ``watch`` returns for it.
    """
    ranks = []
    for _ in range(2):
        net = Net(make)
        plugin = None if watch is None else watch(net)
        ranks.append((net, plugin, objects_of(net, *([plugin] if plugin else []))))
    (changed, first, objects), (fresh, _, others) = ranks
    change(changed, *([first] if first else []))
    fresh.load_state_dict(changed.state_dict())
    restore(others.by_name, objects.state())
    return changed, fresh


# --- one object stays one -------------------------------------------------------------------------


class Watch:
    def __init__(self, net):
        self.seen = net.losses


def test_a_list_that_a_callback_took():
    def make(net):
        net.losses = []

    watchers = []
    _, fresh = taken_over(
        make,
        lambda net, watch: net.losses.append(0.5),
        lambda net: watchers.append(Watch(net)) or watchers[-1],
    )
    fresh.losses.append(1.0)
    assert watchers[1].seen == [0.5, 1.0]


@pytest.mark.parametrize("value", [[], {}, Meter(), torch.zeros(2), random.Random(1)])
def test_an_object_of_the_training(value):
    def change(net):
        net.first = net.second = [value]
        net.third = value

    _, fresh = taken_over(None, change)
    assert fresh.first is fresh.second
    assert fresh.first[0] is fresh.third
    assert type(fresh.third) is type(value)


def test_views_of_tensors_of_parameters_and_of_arrays():
    def make(net):
        net.table, net.array = torch.zeros(4), numpy.zeros(4)
        net.first, net.few = net.table[:2], net.array[:2]
        net.row = net.layer.weight[1:]

    def change(net):
        net.table += 1
        net.array += 1
        net.bias, net.new = net.layer.bias.detach()[1:], net.table[3:]
        net.late = torch.arange(3.0)
        net.later = net.late.view(3, 1)
        with torch.no_grad():
            net.layer.weight += 1

    changed, fresh = taken_over(make, change)
    assert fresh.table.tolist() == fresh.array.tolist() == [1.0] * 4
    assert fresh.row.tolist() == changed.row.tolist()
    for tensor in (fresh.table, fresh.late, fresh.array):
        tensor += 1
    with torch.no_grad():
        fresh.layer.bias.fill_(7.0)
    assert (fresh.first.tolist(), fresh.new.tolist(), fresh.few.tolist()) == ([2, 2], [2], [2, 2])
    assert (fresh.bias.tolist(), fresh.later.tolist()) == ([7.0], [[1.0], [2.0], [3.0]])


def test_buffers_in_place_and_in_lists():
    def make(net):
        net.parts, net.tied = [net.mean], [net.layer.weight]

    changed, fresh = Net(make), Net(make)
    held = fresh.mean, fresh.layer.weight
    objects, others = map(objects_of, (changed, fresh))
    changed.mean += 3
    changed.parts.append(changed.kept)
    fresh.load_state_dict(changed.state_dict())
    restore(others.by_name, objects.state())
    assert (fresh.mean, fresh.layer.weight) == (fresh.parts[0], fresh.tied[0])
    assert all(a is b for a, b in zip((fresh.mean, fresh.layer.weight), held, strict=True))
    assert held[0].tolist() == [3.0, 3.0]
    assert fresh.parts[1] is fresh.kept


@pytest.mark.parametrize("name", ["mean", "kept"])
def test_a_buffer_that_was_replaced_is_another_tensor_than_before(name):
    def make(net):
        net.before = [getattr(net, name)]

    _, fresh = taken_over(make, lambda net: setattr(net, name, getattr(net, name) + 5))
    assert getattr(fresh, name).tolist() == [5.0, 5.0]
    assert fresh.before[0].tolist() == [0.0, 0.0]  # as an average of it would see it


def test_objects_that_change_places():
    def make(net):
        net.current, net.previous = torch.zeros(1), torch.ones(1)
        net.same = net.other = [1]

    def change(net):
        net.current, net.previous = net.previous, net.current
        net.same = [2]

    _, fresh = taken_over(make, change)
    assert (fresh.current.item(), fresh.previous.item()) == (1.0, 0.0)
    assert (fresh.same, fresh.other) == ([2], [1])


def test_objects_that_refer_to_each_other():
    def change(net):
        net.meter.net, net.meter.child = net, Meter()
        net.meter.child.parent = net.meter

    def make(net):
        net.meter = Meter()

    _, fresh = taken_over(make, change)
    assert fresh.meter.net is fresh
    assert fresh.meter.child.parent is fresh.meter


# --- kinds of objects -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_type_that_change_past_the_version_counter(dtype):
    def make(net):
        net.tensor = torch.empty(16, dtype=torch.uint8).zero_()
        with_type = dtype.itemsize and not str(dtype).startswith(("torch.q", "torch.bits"))
        net.view = net.tensor.view(dtype) if with_type else None

    def change(net):
        net.tensor.data.fill_(1)

    changed, fresh = taken_over(make, change)
    assert fresh.tensor.tolist() == [1] * 16
    if changed.view is not None:
        assert fresh.view.dtype == dtype
        assert fresh.view.untyped_storage().data_ptr() == fresh.tensor.data_ptr()


def test_memory_that_changes_past_the_version_counter():
    def make(net):
        net.tensor, net.array = torch.zeros(2), numpy.zeros(2)
        net.shrinks, net.grows, net.moves = torch.ones(4), torch.ones(2), torch.ones(2)

    def change(net):
        net.tensor.numpy()[0] = 1.0
        torch.from_numpy(net.array)[1] = 2.0
        net.mean.data.add_(1)
        net.shrinks.resize_(2)
        net.grows.resize_(3).fill_(5.0)
        net.moves.data = torch.zeros(3)
        net.layer.bias.requires_grad_(False)
        with torch.inference_mode():
            net.output = torch.ones(2)

    _, fresh = taken_over(make, change)
    assert (fresh.tensor.tolist(), fresh.array.tolist()) == ([1.0, 0.0], [0.0, 2.0])
    assert (fresh.shrinks.tolist(), fresh.grows.tolist()) == ([1.0] * 2, [5.0] * 3)
    assert (fresh.moves.tolist(), fresh.mean.tolist()) == ([0.0] * 3, [1.0] * 2)
    assert (fresh.layer.bias.requires_grad, fresh.layer.weight.requires_grad) == (False, True)
    assert fresh.output.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("make_container", CONTAINERS)
def test_containers_change_in_place(make_container):
    def make(net):
        net.container = make_container()

    def change(net):
        container, tensor = net.container, torch.ones(1)
        if isinstance(container, dict | UserDict):
            container["x"] = container["y"] = [tensor]
        elif isinstance(container, SimpleNamespace | Namespace):
            container.x = container.y = tensor
        elif isinstance(container, set):
            container.add("x")
        else:
            container.extend([[tensor], [tensor]])

    fresh = Net(make)
    held = fresh.container
    changed = Net(make)
    objects, others = map(objects_of, (changed, fresh))
    change(changed)
    restore(others.by_name, objects.state())
    assert fresh.container is held
    assert type(held) is type(changed.container)
    assert held == changed.container


@pytest.mark.parametrize("bits", BITS, ids=lambda bits: bits.__name__)
def test_random_generators_change_in_place(bits):
    def make(net):
        net.python, net.torch = random.Random(1), torch.Generator().manual_seed(1)
        net.new, net.old = numpy.random.Generator(bits(1)), numpy.random.RandomState(1)
        net.held = [net.python, net.torch, net.new, net.old]

    def draw(net):
        return (
            net.held[0].random(),
            torch.rand(1, generator=net.held[1]).item(),
            net.held[2].random(),
            net.held[3].random_sample(),
        )

    changed, fresh = taken_over(make, draw)
    assert draw(fresh) == draw(changed)
    assert fresh.held[2] is fresh.new


def test_users_objects_also_in_lists_and_with_slots_and_modules_that_are_hidden():
    def make(net):
        net.meters, net.slots = [Meter()], Slots()
        net.teacher = [nn.Linear(2, 2)]
        net.gone = 1

    def change(net):
        net.meters[0].total, net.slots.count = 3, 4
        net.meters.append(Meter())
        net.teacher[0].weight.data.fill_(2.0)
        net.best = [deepcopy(net.layer)]
        net.number, net.numpy_number = 2.5, numpy.float64(0.5)
        del net.gone

    changed, fresh = taken_over(make, change)
    assert [meter.total for meter in fresh.meters] == [3, 0]
    assert (fresh.slots.count, fresh.teacher[0].weight.tolist()) == (4, [[2.0] * 2] * 2)
    assert torch.equal(fresh.best[0].weight, changed.best[0].weight)
    assert (fresh.number, fresh.numpy_number, hasattr(fresh, "gone")) == (2.5, 0.5, False)


# --- what is left out -----------------------------------------------------------------------------


def test_what_has_not_changed_is_left_out():
    net = Net()
    net.table, net.array = torch.zeros(100_000), numpy.zeros(100_000)
    objects = objects_of(net)
    assert len(objects.state()) < 1000
    net.table += 1
    net.array += 1
    assert len(objects.state()) > 1_200_000


def test_what_cannot_be_pickled_is_left_out_with_a_warning():
    def make(net):
        net.counts, net.number = itertools.repeat(1), 1

    def change(net):
        net.counts, net.number = (i for i in range(3)), 2

    with pytest.warns(UserWarning, match=r"elastic: module.counts cannot be pickled \(TypeError"):
        _, fresh = taken_over(make, change)
    assert (fresh.number, next(fresh.counts)) == (2, 1)


def test_an_object_that_the_new_rank_lacks_is_an_error():
    changed, fresh = Net(), Net()
    changed.stray = object()
    changed_objects = objects_of(changed)
    changed.held = [changed.stray]
    with pytest.raises(TrainingError, match=r"has module.stray, which.*Fix: create the same"):
        restore(objects_of(fresh).by_name, changed_objects.state())


class Strict:
    """Raises for whatever asks it: as objects of libraries may, which a run only passes on."""

    __slots__ = ("empty", "kept")

    def __init__(self):
        self.kept = [1]

    def __getattr__(self, name):
        raise TypeError(f"cannot make {name}")

    @property
    def __class__(self):
        raise RuntimeError("outside of its context")


class StrictDict(dict):
    def items(self):
        raise RuntimeError("closed")

    __iter__ = keys = values = items


class StrictList(list):
    def __iter__(self):
        raise RuntimeError("closed")


def test_objects_are_read_without_their_own_code():
    def make(net):
        net.things = [Strict(), StrictDict(a=[1]), StrictList([[1]])]

    old, new = Net(make), Net(make)
    objects = RankObjects(run_of(old), set)
    strict, by_key, listed = old.things
    strict.kept.append(2)
    dict.__getitem__(by_key, "a").append(2)
    listed[0].append(2)
    restore(RankObjects(run_of(new), set).by_name, objects.state())
    strict, by_key, listed = new.things
    assert [strict.kept, dict.__getitem__(by_key, "a"), listed[0]] == [[1, 2]] * 3


class Connection:
    """Opens a connection of its own in each process."""

    def __init__(self):
        self.number, self.lock = 1, threading.Lock()

    def __getstate__(self):
        return {}


def test_an_object_that_pickles_itself_stays_as_it_is(recwarn):
    def make(net):
        net.connection, net.count = Connection(), 0

    old, new = Net(make), Net(make)
    objects = RankObjects(run_of(old), set)
    old.connection.number, old.count = 2, 3
    restore(RankObjects(run_of(new), set).by_name, objects.state())
    assert (new.connection.number, new.count) == (1, 3)
    assert not recwarn.list
