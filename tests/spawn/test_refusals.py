"""The search for objects that cannot be pickled, and their paths."""

import functools
import pickle
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from geartrain_spawn.refusals import plain_dump, refusals

LOCK = threading.Lock()


class Holder:
    def __init__(self, **attributes):
        vars(self).update(attributes)


class Refuses:
    def __reduce__(self):
        raise RuntimeError("not this one")


class Slotted:
    __slots__ = ("lock", "other")

    def __init__(self):
        self.lock, self.other = threading.Lock(), 1


def importable():
    return LOCK


def paths(thing, **how):
    return [refusal.path for refusal in refusals("it", thing, plain_dump, **how)]


def test_objects_that_pickle_are_not_refused():
    fine = [
        nn.Linear(2, 2),
        {"a": torch.ones(3)},
        importable,
        Holder,
        functools.partial(importable),
        None,
    ]
    assert paths(fine) == []


@pytest.mark.parametrize(
    ("thing", "expected"),
    [
        (LOCK, ["it"]),
        ([1, LOCK, (2, {"a": LOCK})], ["it[1]", "it[2][1]['a']"]),
        (Holder(a=Holder(lock=LOCK), b=1, c=LOCK), ["it.a.lock", "it.c"]),
        (Slotted(), ["it.lock"]),
        (Holder(a=Refuses(), b=(i for i in range(3))), ["it.a", "it.b"]),
        (functools.partial(importable, LOCK, key=LOCK), ["it.args[0]", "it.keywords['key']"]),
        (Holder(lock=LOCK).__init__, ["it.__self__.lock"]),
        (lambda: LOCK, ["it"]),
    ],
)
def test_every_innermost_refused_object_is_named(thing, expected):
    assert paths(thing) == expected


def test_an_nn_module_s_parts_have_the_names_that_users_type():
    net = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    net[0].lock = LOCK
    net[1].register_forward_hook(lambda *given: None)
    assert paths(net)[0] == "it.0.lock"
    assert paths(net)[1].startswith("it.1._forward_hooks[")


def test_a_shared_object_is_named_under_each_holder():
    shared = Holder(lock=LOCK)
    assert paths({"a": shared, "b": shared}) == ["it['a'].lock", "it['b'].lock"]


def test_a_part_that_refers_to_its_holder_is_not_named():
    net, child, grandchild = Holder(), Holder(), Holder()
    net.child, child.child, grandchild.back, net.lock = child, grandchild, net, LOCK
    assert paths(net) == ["it.lock"]


def test_a_refused_part_that_refers_to_its_holder_is_named():
    class Local(Holder):
        pass

    net = Holder()
    net.child = Local(back=net)
    assert paths(net) == ["it.child's class"]
    odd = Refuses()
    vars(odd)["back"] = net = Holder(child=odd)
    assert paths(net) == ["it.child"]


def test_a_refusal_has_the_type_and_the_reason():
    (lock,) = refusals("it", LOCK, plain_dump)
    assert (lock.what, lock.is_name) == ("_thread.lock", False)
    assert "pickle" in lock.why
    (function,) = refusals("it", lambda: 1, plain_dump)
    assert function.is_name
    assert function.what.startswith("<lambda> at test_refusals.py:")

    class Local:
        pass

    (found,) = refusals("it", Local(), plain_dump)
    assert found.is_name
    assert found.what.startswith("class ")
    assert found.what.endswith("Local")


def test_objects_that_a_function_uses_are_searched_if_its_code_is_pickled():
    """As with cloudpickle; this test's pickler refuses every function, and locks."""
    lock, empty = threading.Lock(), None

    def made():
        return lock, later, empty

    assert set(paths(made, by_value=True)) == {"it (its variable 'lock')"}
    assert paths(made) == ["it"]
    if Path is None:
        later = 1


def test_a_function_s_defaults_are_searched_including_keyword_defaults():
    def made(first=LOCK, *, second=LOCK, third=1):
        return first, second, third

    assert set(paths(made, by_value=True)) == {"it (its default 0)", "it (its default 'second')"}


def test_memory_of_tensors_is_not_copied():
    written = []

    class Counting:
        def write(self, data):
            written.append(len(data))

    plain_dump(nn.Linear(1000, 1000), Counting())
    assert sum(written) < 10_000


def test_plain_dump_is_pickle_otherwise(tmp_path):
    with (tmp_path / "file").open("wb") as file:
        plain_dump({"a": [1, Holder(b=2)]}, file)
    assert pickle.loads((tmp_path / "file").read_bytes())["a"][1].b == 2
