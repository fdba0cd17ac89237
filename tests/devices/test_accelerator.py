"""Test ``TorchAccelerator``: a type that is here, and the reasons of those that are not."""

import sys
from types import SimpleNamespace

import pytest
import torch
from small_models import Net, assert_equal, fit

import geartrain as gt
from geartrain import TrainingError, UsageError, hookimpl
from geartrain_devices import NPUAccelerator, TorchAccelerator, XPUAccelerator


class Own(TorchAccelerator):
    """A stranger's accelerator. The CPU is the only type of device that every machine has."""

    device_type = "cpu"


def test_a_subclass_that_names_a_type_trains():
    class Asks:
        @hookimpl
        def on_run_end(self, run):
            self.device = run.device

    asks, expected, found = Asks(), Net(), Net()
    found.load_state_dict(expected.state_dict())
    fit(expected, seed=1)
    fit(found, seed=1, accelerator=Own(), devices=1, plugins=[asks])
    assert_equal(expected, found)
    assert asks.device == torch.device("cpu", 0)


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (XPUAccelerator, r"finds no device of the type xpu. Fix: .*--accelerator cpu"),
        (NPUAccelerator, r"torch_npu is not installed. Fix: pip install torch-npu"),
    ],
)
def test_a_device_that_is_missing_is_one_error(cls, reason):
    with pytest.raises(UsageError, match=rf"cannot be used here: .*{reason}"):
        gt.Trainer(accelerator=cls.device_type, devices=2)
    (problem,) = cls.diagnose()["problems"]
    assert problem in cls.unavailable()


def test_a_broken_package_is_a_problem_of_the_diagnosis(monkeypatch):
    class Broken(Own):
        package = "json"

        @classmethod
        def device_count(cls):
            raise OSError("the driver is gone")

    found = Broken.diagnose()
    assert found["problems"] == ["OSError: the driver is gone. Fix: --accelerator cpu"]
    assert found["facts"]["json"] == "not installed"  # as a distribution


class Module(SimpleNamespace):
    """The module of a type with two devices."""

    def __init__(self):
        super().__init__(memory_allocated=lambda device: 2**21, is_available=lambda: True)
        self.emptied = 0

    def device_count(self):
        return 2

    def set_device(self, index):
        self.index = index

    def get_device_name(self, index):
        return f"Chip {index}"

    def empty_cache(self):
        self.emptied += 1


class Two(Own):
    module = Module()

    @classmethod
    def device_module(cls):
        return cls.module

    def index_of(self, run, local_rank):
        index = super().index_of(run, local_rank)
        assert index == 1
        return 0  # the CPU has no second device


class Asks:
    @hookimpl
    def on_run_end(self, run):
        (self.stats,) = run.hooks.device_stats(run=run)


def test_what_the_module_of_a_type_has_is_used():
    asks = Asks()
    fit(Net(), accelerator=Two(), devices=[1], plugins=[asks])
    assert asks.stats == {"cpu0_memory_allocated_mib": 2.0}
    assert (Two.module.index, Two.module.emptied) == (0, 1)
    assert Two.diagnose()["devices"] == [
        {"index": 0, "name": "Chip 0"},
        {"index": 1, "name": "Chip 1"},
    ]


def test_a_device_that_does_not_start_is_one_error(monkeypatch):
    class Busy(Two):
        def start(self, index):
            raise RuntimeError("busy\nframes of C++")

    with pytest.raises(
        TrainingError, match=r"cpu:0 cannot be used: busy. Fix: run geartrain doctor"
    ):
        fit(Net(), accelerator=Busy(), devices=[1])


def test_several_devices_in_a_process_are_refused():
    with pytest.raises(UsageError, match=r"several devices in a process.*Fix: --strategy ddp"):
        fit(Net(), accelerator=Two(), devices=2, strategy="dp")


def test_ddp_takes_the_backend_of_the_type(monkeypatch):
    from geartrain_ddp.strategy import _default_backend

    known = torch.distributed.Backend.default_device_backend_map
    monkeypatch.setitem(known, "npu", "hccl")
    assert [_default_backend(t) for t in ("npu", "cuda", "xpu", "cpu", "unknown")] == [
        *("hccl", "nccl", "xccl", "gloo", "gloo")
    ]


def test_the_import_loads_no_vendors_package():
    assert "torch_npu" not in sys.modules
