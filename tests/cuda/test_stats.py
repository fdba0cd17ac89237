"""device_stats: which figures, in which units, and what becomes of those that NVML cannot say."""

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
    """The figures of one GPU, without those of torch."""
    found = {
        name.removeprefix(f"gpu{index}_"): value
        for name, value in sample.items()
        if name.startswith(f"gpu{index}_")
    }
    return {name: value for name, value in found.items() if not name.startswith("torch_")}


def test_every_figure_in_its_unit(machine):
    machine(1)
    sample = CUDAAccelerator().device_stats(make_run())
    assert figures(0, sample) == ALL
    assert {name: value for name, value in sample.items() if "torch" in name} == {
        "gpu0_torch_allocated_mib": 1,
        "gpu0_torch_reserved_mib": 2,
    }
    assert all(type(value) is float for value in sample.values())


def test_one_rank_a_node_reports_all_gpus_of_the_plan_and_its_own_memory(machine, monkeypatch):
    machine(4)
    sample = stats.Stats().sample(make_run(devices=(3, 1)))
    assert {name.partition("_")[0] for name in sample} == {"gpu1", "gpu3"}
    assert {name for name in sample if "torch" in name} == {
        "gpu3_torch_allocated_mib",
        "gpu3_torch_reserved_mib",
    }
    assert stats.Stats().sample(make_run(devices=(3, 1), local_rank=1)) is None


def test_dp_has_memory_on_all_of_its_gpus(machine):
    machine(2)
    sample = stats.Stats().sample(make_run(devices=(0, 1), each=2))
    assert (sample["gpu0_torch_allocated_mib"], sample["gpu1_torch_allocated_mib"]) == (1, 2)


def test_indices_are_cudas(machine, monkeypatch):
    machine(FakeGPU("GPU-a", used=0), FakeGPU("GPU-b", used=7 * 2**20))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert stats.Stats().sample(make_run())["gpu0_memory_used_mib"] == 7


@pytest.mark.parametrize(
    "error",
    [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_UNKNOWN],
)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_figure_that_cannot_be_had_is_left_out_alone(machine, function, error):
    machine(FakeGPU("GPU-a", errors={function: error}))
    assert set(figures(0, stats.Stats().sample(make_run()))) == set(ALL) - FUNCTIONS[function]


@pytest.mark.parametrize(
    ("reason", "groups"),
    [
        ("GpuIdle", set()),
        ("ApplicationsClocksSetting", set()),
        ("SwThermalSlowdown", {"thermal"}),
        ("HwThermalSlowdown", {"thermal"}),
        ("SwPowerCap", {"power"}),
        ("HwPowerBrakeSlowdown", {"power"}),
        ("HwSlowdown", {"hw_slowdown"}),
    ],
)
@pytest.mark.parametrize("old_driver", [False, True])
def test_why_clocks_are_held_down(machine, reason, groups, old_driver):
    errors = (
        {"nvmlDeviceGetCurrentClocksEventReasons": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}
        if old_driver
        else {}
    )
    machine(
        FakeGPU(
            "GPU-a", clock_reasons=getattr(pynvml, f"nvmlClocksEventReason{reason}"), errors=errors
        )
    )
    found = figures(0, stats.Stats().sample(make_run()))
    assert {
        name.removeprefix("throttled_")
        for name in found
        if name.startswith("throttled_") and found[name]
    } == groups
    assert found["throttled"] == bool(groups)
    assert set(found) == set(ALL)


def test_nvlink_is_a_rate_between_samples(machine, monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 5.0, 6.0, 7.0])
    monkeypatch.setattr(stats, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    #        sample 1: before, after       2: before, after               3: the counters began anew
    counts = [(0, 0), (1024, 2048), (9, 9), (1024 * 9, 2048 * 9), (1, 1), (2, 2)]
    machine(FakeGPU("GPU-a", links=counts))
    keeper = stats.Stats()
    rates = [figures(0, keeper.sample(make_run())) for _ in range(3)]
    assert [(r["nvlink_tx_mib_per_s"], r["nvlink_rx_mib_per_s"]) for r in rates] == [
        (1, 2),
        (2, 4),
        (0, 0),
    ]
    assert (
        set(rates[0]) == set(rates[1]) == set(ALL) | {"nvlink_tx_mib_per_s", "nvlink_rx_mib_per_s"}
    )


def test_a_mig_instance_has_memory_of_its_own_and_the_boards_temperature(machine):
    unsupported = dict.fromkeys(FUNCTIONS, pynvml.NVML_ERROR_NOT_SUPPORTED)
    del unsupported["nvmlDeviceGetMemoryInfo"]
    instance = FakeGPU("MIG-a", used=5 * 2**20, total=10 * 2**20, errors=unsupported)
    machine(FakeGPU("GPU-a", instances=[instance]))
    found = figures(0, stats.Stats().sample(make_run()))
    assert (found["memory_used_mib"], found["memory_total_mib"], found["temperature_celsius"]) == (
        5,
        10,
        61,
    )
    assert "utilization_percent" not in found


@pytest.mark.parametrize("missing", ["nvml", "rocm", "index"])
def test_without_nvml_torch_tells_its_own(machine, monkeypatch, missing):
    machine(
        0 if missing == "index" else 1,
        error=pynvml.NVML_ERROR_DRIVER_NOT_LOADED if missing == "nvml" else None,
    )
    if missing == "rocm":
        monkeypatch.setattr(torch.version, "hip", "6.4")
    assert stats.Stats().sample(make_run()) == {
        "gpu0_torch_allocated_mib": 1,
        "gpu0_torch_reserved_mib": 2,
    }
