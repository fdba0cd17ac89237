"""A fake Mac GPU: torch reports it, and tensors that move to it stay on the CPU."""

import platform

import pytest
import torch

import geartrain as gt

_TO = torch.Tensor.to
MIB = 2**20


class Metal:
    """The fake device, with a record of its calls."""

    def __init__(self, patch):
        self._patch = patch
        #: (dtype, non_blocking) of every tensor that was moved.
        self.moved, self.emptied = [], 0
        self.generator = torch.Generator()

    def answers(self, built=True, available=True, macos="15.1"):
        self._patch.setattr(torch.backends.mps, "is_built", lambda: built)
        self._patch.setattr(torch.backends.mps, "is_available", lambda: available)
        self._patch.setattr(platform, "mac_ver", lambda: (macos, ("", "", ""), "arm64"))

    def empty_cache(self):
        self.emptied += 1

    def to(self, tensor, *given, **named):
        """Imitate ``Tensor.to`` and its error, but stay on the CPU."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*given, **named)
        if device is None or device.type != "mps":
            return _TO(tensor, *given, **named)
        assert device == torch.device("mps:0")
        dtype = dtype or tensor.dtype
        if dtype == torch.float64:  # the message of aten/src/ATen/mps/EmptyTensor.cpp
            raise TypeError(
                "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support "
                "float64. Please use float32 instead."
            )
        self.moved.append((dtype, non_blocking))
        return _TO(tensor, dtype=dtype)


@pytest.fixture
def metal(monkeypatch):
    """Simulate a machine with macOS 15.1 and a Metal device."""
    made = Metal(monkeypatch)
    made.answers()
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M4")
    monkeypatch.setattr(torch.backends.mps, "get_core_count", lambda: 10)
    monkeypatch.setattr(torch.mps, "empty_cache", made.empty_cache)
    monkeypatch.setattr(torch.mps, "get_rng_state", made.generator.get_state)
    monkeypatch.setattr(torch.mps, "set_rng_state", made.generator.set_state)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 300 * MIB)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 200 * MIB)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 10922 * MIB)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda tensor, *given, **named: made.to(tensor, *given, **named)
    )
    return made


@pytest.fixture
def trainer(tmp_path):
    """``trainer(max_epochs=2)``: return a Trainer on mps without a progress bar."""

    def make(**options):
        return gt.Trainer(
            **{"accelerator": "mps", "max_epochs": 1, "enable_progress_bar": False, **options}
        )

    return make
