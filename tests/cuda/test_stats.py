"""device_stats: the figures, their units, and figures that NVML does not know."""

import types

import pynvml
import pytest
import torch

from geartrain import World
from geartrain_cuda import CUDAAccelerator, stats

from .fake_pynvml import FakeGPU

ALL = {
    "utilization_percent": 97,
    "memory_utilization_percent": 41,
    "memory_used_mib": 1000,
    "memory_total_mib": 143771,
    "temperature_celsius": 61,
    "power_watt": 512.5,
    "sm_clock_mhz": 1980,
    "memory_clock_mhz": 3201,
    "pcie_tx_mib_per_s": 2,
    "pcie_rx_mib_per_s": 4,
    "ecc_corrected_errors": 0,
    "ecc_uncorrected_errors": 0,
    "throttled": 0,
    "throttled_thermal": 0,
    "throttled_power": 0,
    "throttled_hw_slowdown": 0,
}
FUNCTIONS = {
    "nvmlDeviceGetUtilizationRates": {"utilization_percent", "memory_utilization_percent"},
    "nvmlDeviceGetMemoryInfo": {"memory_used_mib", "memory_total_mib"},
    "nvmlDeviceGetTemperature": {"temperature_celsius"},
    "nvmlDeviceGetPowerUsage": {"power_watt"},
    "nvmlDeviceGetClockInfo": {"sm_clock_mhz", "memory_clock_mhz"},
    "nvmlDeviceGetPcieThroughput": {"pcie_tx_mib_per_s", "pcie_rx_mib_per_s"},
    "nvmlDeviceGetTotalEccErrors": {"ecc_corrected_errors", "ecc_uncorrected_errors"},
    "nvmlDeviceGetFieldValues": set(),
}


@pytest.fixture(autouse=True)
def _memory_of_torch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: (device.index + 1) * 2**20)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: (device.index + 1) * 2**21)


def make_run(devices=(0,), each=1, local_rank=0):
    plan = types.SimpleNamespace(
        devices=devices, layout=types.SimpleNamespace(devices_per_process=each)
    )
    return types.SimpleNamespace(plan=plan, world=World(local_rank=local_rank, rank=local_rank))


def figures(index, sample):
    """Return the figures of one GPU, without those of torch."""
    prefix = f"gpu{index}_"
    names = [name for name in sample if name.startswith(prefix)]
    return {name.removeprefix(prefix): sample[name] for name in names if "_torch_" not in name}


def test_every_figure_has_its_unit(machine):
    machine(1)
    sample = CUDAAccelerator().device_stats(make_run())
    assert figures(0, sample) == ALL
    assert {name: value for name, value in sample.items() if "torch" in name} == {
        "gpu0_torch_allocated_mib": 1,
        "gpu0_torch_reserved_mib": 2,
    }
    assert all(type(value) is float for value in sample.values())


def test_one_rank_of_a_node_reports_all_gpus_of_the_plan_and_its_memory(machine, monkeypatch):
    machine(4)
    sample = stats.Stats().sample(make_run(devices=(3, 1)))
    assert {name.partition("_")[0] for name in sample} == {"gpu1", "gpu3"}
    memory = {name for name in sample if "torch" in name}
    assert memory == {"gpu3_torch_allocated_mib", "gpu3_torch_reserved_mib"}
    assert stats.Stats().sample(make_run(devices=(3, 1), local_rank=1)) is None
    of_dp = stats.Stats().sample(make_run(devices=(0, 1), each=2))
    assert (of_dp["gpu0_torch_allocated_mib"], of_dp["gpu1_torch_allocated_mib"]) == (1, 2)


def test_indices_are_cudas(machine, monkeypatch):
    machine(FakeGPU("GPU-a", used=0), FakeGPU("GPU-b", used=7 * 2**20))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert stats.Stats().sample(make_run())["gpu0_memory_used_mib"] == 7


@pytest.mark.parametrize("function", FUNCTIONS)
def test_only_figures_that_nvml_does_not_know_are_missing(machine, function):
    machine(FakeGPU("GPU-a", errors={function: pynvml.NVML_ERROR_NOT_SUPPORTED}))
    assert set(figures(0, stats.Stats().sample(make_run()))) == set(ALL) - FUNCTIONS[function]


@pytest.mark.parametrize(
    ("reason", "groups", "old_driver"),
    [
        ("GpuIdle", set(), False),
        ("SwThermalSlowdown", {"thermal"}, False),
        ("HwThermalSlowdown", {"thermal"}, True),
        ("SwPowerCap", {"power"}, False),
        ("HwPowerBrakeSlowdown", {"power"}, False),
        ("HwSlowdown", {"hw_slowdown"}, False),
    ],
)
def test_reasons_for_reduced_clocks_are_in_groups(machine, reason, groups, old_driver):
    errors = {"nvmlDeviceGetCurrentClocksEventReasons": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}
    bits = getattr(pynvml, f"nvmlClocksEventReason{reason}")
    machine(FakeGPU("GPU-a", clock_reasons=bits, errors=errors if old_driver else {}))
    found = figures(0, stats.Stats().sample(make_run()))
    flags = {name for name in found if name.startswith("throttled_") and found[name]}
    assert {name.removeprefix("throttled_") for name in flags} == groups
    assert found["throttled"] == bool(groups)
    assert set(found) == set(ALL)


def test_nvlink_is_a_rate_between_samples(machine, monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 5.0, 6.0, 7.0])
    monkeypatch.setattr(stats, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    #        sample 1: before, after       2: before, after               3: after a reset
    counts = [(0, 0), (1024, 2048), (9, 9), (1024 * 9, 2048 * 9), (1, 1), (2, 2)]
    machine(FakeGPU("GPU-a", links=counts))
    keeper = stats.Stats()
    rates = [figures(0, keeper.sample(make_run())) for _ in range(3)]
    sent, received = "nvlink_tx_mib_per_s", "nvlink_rx_mib_per_s"
    assert [(rate[sent], rate[received]) for rate in rates] == [(1, 2), (2, 4), (0, 0)]
    assert set(rates[0]) == set(rates[1]) == set(ALL) | {sent, received}


def test_a_mig_instance_has_its_own_memory_and_the_boards_temperature(machine):
    unsupported = dict.fromkeys(FUNCTIONS, pynvml.NVML_ERROR_NOT_SUPPORTED)
    del unsupported["nvmlDeviceGetMemoryInfo"]
    instance = FakeGPU("MIG-a", used=5 * 2**20, total=10 * 2**20, errors=unsupported)
    machine(FakeGPU("GPU-a", instances=[instance]))
    found = figures(0, stats.Stats().sample(make_run()))
    assert (found["memory_used_mib"], found["memory_total_mib"]) == (5, 10)
    assert found["temperature_celsius"] == 61
    assert "utilization_percent" not in found


@pytest.mark.parametrize("missing", ["nvml", "rocm", "index"])
def test_without_nvml_the_sample_has_torchs_memory(machine, monkeypatch, missing):
    error = pynvml.NVML_ERROR_DRIVER_NOT_LOADED if missing == "nvml" else None
    machine(0 if missing == "index" else 1, error=error)
    if missing == "rocm":
        monkeypatch.setattr(torch.version, "hip", "6.4")
    assert stats.Stats().sample(make_run()) == {
        "gpu0_torch_allocated_mib": 1,
        "gpu0_torch_reserved_mib": 2,
    }
