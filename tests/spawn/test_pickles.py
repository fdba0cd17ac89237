"""Objects that travel to a rank, and errors that name those that cannot."""

import functools
import gc
import importlib.util
import os
import sys
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain_spawn.files import AnonymousFile

from .models import Net, loader, samples, trainer


def round_trip(thing):
    file = AnonymousFile()
    try:
        file.dump(thing)
        return file.load()
    finally:
        file.close()


# --- tensors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor(3),
        torch.empty(0),
        torch.tensor([True, False]),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, requires_grad=True),
        torch.arange(12).as_strided((2, 2), (5, 2), 1),
    ],
    ids=str,
)
def test_tensors_keep_value_type_and_form(tensor):
    same = round_trip([tensor])[0]
    assert torch.equal(same, tensor)
    assert (same.dtype, same.shape, same.requires_grad) == (
        tensor.dtype,
        tensor.shape,
        tensor.requires_grad,
    )


def test_tensors_that_share_memory_still_share_it_but_not_with_the_originals():
    whole = torch.arange(10.0)
    same, part = round_trip((whole, whole[2:5]))
    same[2] = 99
    assert part[0] == 99
    assert whole[2] == 2


def test_a_model_keeps_tied_weights_and_trains():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    same = round_trip(net)
    assert same[1].weight is same[0].weight
    same(torch.ones(1, 3)).sum().backward()
    torch.optim.SGD(same.parameters(), 0.1).step()
    assert not torch.equal(same[0].weight, net[0].weight)


def test_two_readers_see_their_own_copies():
    file = AnonymousFile()
    file.dump(torch.zeros(3))
    first, second = file.load(), file.load()
    first += 1
    assert second.sum() == 0
    assert file.load().sum() == 0
    file.close()


def test_a_file_that_could_not_be_written_is_empty():
    file = AnonymousFile()
    with pytest.raises(TypeError):
        file.dump([torch.zeros(1000), threading.Lock()])
    assert file.is_empty()
    assert file.load() is None
    file.dump("written again")
    assert file.load() == "written again"
    file.close()


def test_a_function_that_is_loaded_from_a_file_travels_by_value(tmp_path, monkeypatch):
    path = tmp_path / "nowhere_importable.py"
    path.write_text("SCALE = 3\ndef scaled(x):\n    return SCALE * x\n")
    spec = importlib.util.spec_from_file_location("nowhere_importable", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "nowhere_importable", module)
    spec.loader.exec_module(module)
    net = Net()
    net.activation = module.scaled
    trainer("forkserver", max_epochs=1).fit(net, loader())
    assert net.losses


# --- refused --------------------------------------------------------------------------------------


class Scale:
    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, value):
        return value


class Data(torch.utils.data.Dataset):
    def __init__(self):
        self.names = {"train": [1, (i for i in range(3))]}

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return samples()[index]


class Locked:
    def __init__(self):
        self.lock = threading.Lock()

    @gt.hookimpl
    def on_step_end(self, run):
        pass


def model_with(**attributes):
    module = Net()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def local_function():
    lock = threading.Lock()
    return lambda x: (lock, x)


@pytest.mark.parametrize(
    ("module", "data", "plugins", "named"),
    [
        (
            model_with(transform=Scale()),
            loader(),
            [],
            "model.transform.lock: _thread.lock cannot be pickled",
        ),
        (
            model_with(extra=local_function()),
            loader(),
            [],
            "model.extra (its variable 'lock'): _thread.lock",
        ),
        (Net(), DataLoader(Data()), [], "train_dataloaders.dataset.names['train'][1]: generator"),
        (
            Net(),
            loader(collate_fn=functools.partial(Scale(), 1)),
            [],
            "train_dataloaders.collate_fn.func.lock: _thread.lock",
        ),
        (Net(), loader(), [Locked()], "Locked.lock: _thread.lock"),
    ],
)
def test_an_object_that_cannot_be_pickled_is_named_by_its_path_before_the_start(
    module, data, plugins, named, tmp_path
):
    one = trainer("forkserver", plugins=plugins, output=tmp_path / "out")
    with pytest.raises(gt.UsageError) as refused:
        one.fit(module, data)
    assert str(refused.value).startswith(f"geartrain-spawn[ddp_spawn]: {named}")
    assert "Fix: create it in setup()" in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_validation_loaders_are_named_as_well():
    with pytest.raises(gt.UsageError, match=r"val_dataloaders\.dataset\.names"):
        trainer("forkserver").fit(Net(), loader(), DataLoader(Data()))


def test_fork_accepts_objects_that_do_not_pickle():
    module = model_with(lock=threading.Lock())
    trainer(max_epochs=1).fit(module, loader())
    assert len(module.losses) == 6
    assert module.lock.acquire(blocking=False)


class BelongsToAThread:
    """Garbage that only its process may collect: elsewhere, C++ objects that join threads abort."""

    def __init__(self):
        self.process, self.cycle = os.getpid(), self

    def __del__(self):
        if os.getpid() != self.process:
            os.abort()


def test_a_forked_rank_does_not_collect_the_garbage_of_its_starter():
    gc.disable()
    try:
        BelongsToAThread()
        trainer(max_epochs=1).fit(Net(), loader())
    finally:
        gc.enable()
        gc.collect()
