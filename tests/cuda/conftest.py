"""Fixtures that simulate NVML and torch on a machine with GPUs."""

import os
import sys

import pytest
import torch

from geartrain_cuda import agree, usable, visible

from .fake_pynvml import FakeGPU, FakeNVML

_OURS = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    agree.RECORD,
    "GEARTRAIN_STARTED_BY",
)


@pytest.fixture(autouse=True)
def _as_after_a_start(monkeypatch, request):
    """Start each test as a new program without our variables, and restore them afterwards.

    Tests on a real GPU keep the variables, which select the GPUs for the tests.
    """
    if request.node.get_closest_marker("cuda"):
        yield
        return
    kept = {name: os.environ.pop(name, None) for name in _OURS}
    monkeypatch.setattr(agree, "_calls", 0)
    monkeypatch.setattr(visible, "_warned", set())
    monkeypatch.setattr(usable, "_counted", {})
    yield
    for name, value in kept.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture
def machine(monkeypatch):
    """``machine(FakeGPU(...), ...)`` and ``machine(2)`` add GPUs and return the fake NVML."""

    def put(*gpus, **more):
        if gpus and isinstance(gpus[0], int):
            gpus = [FakeGPU(f"GPU-{letter * 8}-0000") for letter in "abcdefgh"[: gpus[0]]]
        fake = FakeNVML(*gpus, **more)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        return fake

    return put


@pytest.fixture
def counts(monkeypatch):
    """``counts(2)``: let torch count two GPUs in another process."""

    def put(number):
        monkeypatch.setattr(usable, "_can_have_any", lambda: True)
        monkeypatch.setattr(usable, "_COUNT", f"print({number})")
        monkeypatch.setattr(usable, "_counted", {})

    return put
