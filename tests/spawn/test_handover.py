"""Test that a rank's changes reach the caller; the rank runs in the caller's process."""

import random
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain_spawn.files import AnonymousFile
from geartrain_spawn.handover import Baseline, apply_result, outcome
from geartrain_spawn.starter import pack

from .models import Net, loader


class InOneProcess:
    """Start one rank in the caller's process, with another run and module than the caller's."""

    @gt.hookimpl
    def plan_processes(self, request):
        return gt.Layout(1, 1)

    @gt.hookimpl
    def launch(self, run, worker):
        payload, answer = pack(run, worker), AnonymousFile()
        run_of_rank, worker_of_rank = payload.load()
        before = Baseline(run_of_rank)
        answer.dump(outcome(run_of_rank, worker_of_rank(0), before))
        return apply_result(run, answer.load())


def fit(module, *plugins, **options):
    one = gt.Trainer(
        accelerator="cpu",
        strategy=InOneProcess(),
        plugins=list(plugins),
        max_epochs=1,
        enable_progress_bar=False,
        **options,
    )
    one.fit(module, loader(8))
    return module


class Color(Enum):
    RED = 1


class Point(NamedTuple):
    x: Any


@dataclass
class Meter:
    total: int = 0
    seen: list = field(default_factory=list)
    kept: int = field(default=0, init=False)


VALUES = [
    Counter("aab"),
    OrderedDict(b=[torch.ones(2)], a={"c": (1, 2)}),
    defaultdict(list, a=[1]),
    deque([1, torch.ones(2)], maxlen=2),
    UserDict(a=1),
    SimpleNamespace(a=1),
    Meter(2, [torch.ones(1)]),
    Point(torch.ones(1)),
    Color.RED,
    Path("a"),
    torch.Size([1]),
    torch.float16,
    bytearray(b"a"),
    range(3),
    numpy.arange(3),
    {frozenset("a"): {1}},
]


def text(value):
    return f"{type(value)} {value!r}"


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_if_it_is_new_or_changed_in_place(value):
    class Sets(Net):
        def on_train_start(self):
            self.new = self.replaced = [value]
            self.changed.append(value)

    module = Sets()
    module.replaced, module.changed = 1, []
    held = module.changed
    fit(module)
    assert text(module.new[0]) == text(value)
    assert module.new[0] is module.replaced[0] is module.changed[0]
    assert module.changed is held


class Watch:
    def __init__(self, losses):
        self.losses, self.count = losses, 0

    @gt.hookimpl
    def on_step_end(self, run):
        self.count += 1
        self.losses.append(run.step)


def test_what_is_shared_stays_shared():
    class Shares(Net):
        def on_train_start(self):
            self.table += 1
            self.late = self.table[2:]
            self.meter.seen.append(self.meter)
            self.weights = [self.net[0].weight]
            self.random.random()

    module = Shares()
    module.taken, module.table, module.meter = [], torch.zeros(4), Meter()
    module.early, module.random = module.table[:2], random.Random(1)
    watch, taken, table = Watch(module.taken), module.taken, module.table
    fit(module, watch)
    assert taken is module.taken is watch.losses
    assert (taken, watch.count) == ([1, 2], 2)
    assert module.table is table
    module.table += 1
    assert (module.early.tolist(), module.late.tolist()) == ([2, 2], [2, 2])
    assert module.meter.seen == [module.meter]
    assert module.weights[0] is module.net[0].weight
    assert module.random.random() != random.Random(1).random()


def test_what_cannot_be_pickled_stays_as_it_was_with_a_warning():
    class Opens(Net):
        def on_train_start(self):
            self.file, self.new, self.count = open(__file__), (n for n in "a"), 1  # noqa: SIM115

    module = Opens()
    module.file = None
    with pytest.warns(UserWarning, match="so no other process gets it") as caught:
        fit(module)
    assert {str(each.message).partition(" cannot be pickled ")[0] for each in caught} == {
        "InOneProcess: module.file",
        "InOneProcess: module.new",
    }
    assert (module.file, module.count, hasattr(module, "new")) == (None, 1, False)


def test_weights_come_back_if_the_objects_cannot():
    class Grows(Net):
        def on_train_start(self):
            self.held = [self.made.value]

    class Makes:
        """Makes an object only when it is unpickled."""

        def __setstate__(self, state):
            self.value = Meter()

    module = Grows()
    module.made, before = Makes(), module.net[0].weight.detach().clone()
    module.made.x = 1
    with pytest.warns(UserWarning, match="the objects of the module and of plugins are as before"):
        fit(module)
    assert not torch.equal(module.net[0].weight, before)


class Changes(Net):
    """Has new modules and other tensors after a run."""

    def setup(self, stage):
        self.head = nn.Linear(1, 1)
        self.net.append(self.head)
        self.register_buffer("later", torch.ones(2), persistent=False)
        self.net[0].weight.requires_grad_(False)
        self.net[1].eval()


def test_modules_tensors_and_modes():
    module = fit(Changes())
    assert module.net[3] is module.head
    assert isinstance(module.head, nn.Linear)
    assert "later" not in module.state_dict()
    assert not module.net[0].weight.requires_grad
    assert [part.training for part in module.net] == [True, False, True, True]
