"""unavailable() returns the first reason against CUDA; diagnose() returns all problems."""

import json

import pynvml
import pytest
import torch

from geartrain_cuda import CUDAAccelerator, diagnose

from .fake_pynvml import MIB, FakeGPU

KEYS = ["index", "name", "uuid", "memory_used_mib", "memory_total_mib"]
KEYS += ["compute_mode", "processes", "mig"]
SLOWDOWN = pynvml.nvmlClocksEventReasonHwThermalSlowdown
LOST = {"nvmlDeviceGetHandleByIndex": pynvml.NVML_ERROR_GPU_IS_LOST}
LOST_LATER = {"nvmlDeviceGetMemoryInfo": pynvml.NVML_ERROR_GPU_IS_LOST}

# --- unavailable ----------------------------------------------------------------------------------


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")
def test_a_cpu_build_of_torch_is_named():
    reason = CUDAAccelerator.unavailable()
    assert reason.startswith(f"torch {torch.__version__} is built without CUDA. Fix: ")


@pytest.mark.parametrize(
    ("gpus", "reason"),
    [
        ([FakeGPU("GPU-a"), FakeGPU("GPU-b")], None),
        ([], "NVML: the driver (580.65.06) shows no GPU. Fix: "),
        ([FakeGPU("GPU-a", instances=[])], "are in MIG mode and have no instance. Fix: "),
        ([FakeGPU("GPU-a", errors=LOST), FakeGPU("GPU-b")], None),
        ([FakeGPU("GPU-a", errors=LOST)], "GPU is lost"),
    ],
)
def test_cuda_is_available_if_one_gpu_can_be_used(machine, gpus, reason):
    machine(*gpus)
    found = CUDAAccelerator.unavailable()
    assert found is None if reason is None else reason in found


def test_the_reason_is_nvmls_error_unless_torch_counts_gpus(machine, counts):
    machine(2, error=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    counts(0)
    assert CUDAAccelerator.unavailable().startswith("NVML: ")
    assert CUDAAccelerator.device_count() == 0
    counts(2)  # CUDA works without NVML
    assert CUDAAccelerator.unavailable() is None
    assert CUDAAccelerator.device_count() == 2


@pytest.mark.parametrize(
    ("variable", "words"),
    [("", "CUDA_VISIBLE_DEVICES='' shows none of the 2 GPUs"), ("7", "'7' names no GPU")],
)
def test_a_variable_that_hides_all_gpus_is_the_reason(machine, monkeypatch, variable, words):
    machine(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert words in CUDAAccelerator.unavailable()
    assert "Fix: " in CUDAAccelerator.unavailable()
    (problem,) = CUDAAccelerator.diagnose()["problems"]
    assert words in problem


def test_torch_counts_the_gpus_of_rocm(machine, counts, monkeypatch):
    machine(2)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.version, "cuda", None)
    counts(0)
    assert "built for ROCm" in CUDAAccelerator.unavailable()
    counts(1)
    assert CUDAAccelerator.unavailable() is None


# --- diagnose -------------------------------------------------------------------------------------


def problems():
    report = CUDAAccelerator.diagnose()
    json.dumps(report)  # doctor --json prints it
    assert list(report) == ["facts", "devices", "problems"]
    assert all(list(device) == KEYS for device in report["devices"])
    assert all("Fix: " in problem for problem in report["problems"])
    return report["problems"]


def test_a_machine_without_problems(machine):
    machine(FakeGPU("GPU-a", processes=[(1, 300 * MIB)]), FakeGPU("GPU-b"), names={1: "python"})
    report = CUDAAccelerator.diagnose()
    assert problems() == []
    facts = report["facts"]
    expected = {"driver": "580.65.06", "driver_cuda": "13.0", "torch_cuda": "13.0", "nvml": "ok"}
    assert {name: facts[name] for name in expected} == expected
    assert facts["torch"] == torch.__version__
    assert {"cudnn", "nccl", "cuda_visible_devices", "torch_hip"} <= set(facts)
    processes = [{"pid": 1, "name": "python", "memory_mib": 300}]
    values = [0, "NVIDIA H200", "GPU-a", 1000, 143771, "default", processes, None]
    assert report["devices"][0] == dict(zip(KEYS, values, strict=True))


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        (
            [{"mode": pynvml.NVML_COMPUTEMODE_PROHIBITED}],
            "PROHIBITED). Fix: nvidia-smi -i 0 -c DE",
        ),
        ([{"errors": LOST}], "GPU 0 (name unknown): GPU is lost. Fix: "),
        ([{"errors": LOST_LATER}], "GPU 0 (NVIDIA H200): GPU is lost"),
        (
            [{"instances": [FakeGPU("MIG-a", errors=LOST_LATER)]}],
            "MIG instance 0 of GPU 0 (NVIDIA H200): GPU is lost",
        ),
        ([{"ecc": (5, 0)}], None),
        ([{"ecc": (5, 2)}], "had 2 memory errors that ECC could not correct"),
        ([{"clock_reasons": SLOWDOWN}], "is slowed down (thermal)"),
        ([{"clock_reasons": pynvml.nvmlClocksEventReasonSwPowerCap}], None),
        ([{"name": "NVIDIA T4"}, {}], "CUDA_DEVICE_ORDER=PCI_BUS_ID"),
    ],
)
def test_problems_of_gpus_are_named(machine, gpus, words):
    machine(*(FakeGPU(f"GPU-{i}", **gpu) for i, gpu in enumerate(gpus)))
    found = problems()
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


#: The architectures of a torch, and of one that has kernels for single models only.
ARCHITECTURES, SINGLE = ["sm_80", "sm_90", "compute_90"], ["sm_100a", "sm_90a"]


@pytest.mark.parametrize(
    ("architectures", "capability", "right"),
    [
        (ARCHITECTURES, (9, 0), True),
        (ARCHITECTURES, (8, 6), True),
        (ARCHITECTURES, (10, 0), True),
        (ARCHITECTURES, (7, 5), False),
        (SINGLE, (10, 0), True),
        (SINGLE, (10, 3), False),
    ],
)
def test_a_gpu_without_kernels_in_torch_is_a_problem(
    machine, monkeypatch, architectures, capability, right
):
    monkeypatch.setattr(diagnose, "_architectures", lambda: architectures)
    machine(FakeGPU("GPU-a", capability=capability))
    found = problems()
    assert (found == []) == right
    assert right or f"compute capability {'.'.join(map(str, capability))}" in found[0]


@pytest.mark.parametrize(
    ("driver", "built", "too_old"),
    [(12020, "12.8", False), (12090, "13.0", True), (13000, "12.8", False), (11040, "12.1", True)],
)
def test_a_driver_too_old_for_torch_is_a_problem(machine, monkeypatch, driver, built, too_old):
    machine(1, cuda=driver)
    monkeypatch.setattr(torch.version, "cuda", built)
    found = [f"torch is built for CUDA {built}" in problem for problem in problems()]
    assert found == [True] * too_old


def test_a_driver_with_a_cpu_build_of_torch_is_a_problem(machine, monkeypatch):
    machine(1)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in problems()[0]


@pytest.mark.parametrize("build", [None, "13.0"])
def test_without_nvml_a_cuda_build_has_a_problem(machine, monkeypatch, build):
    machine(error=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    monkeypatch.setattr(torch.version, "cuda", build)
    report = CUDAAccelerator.diagnose()
    assert report["facts"]["nvml"] == "NVML: Driver Not Loaded"
    assert report["devices"] == []
    # A CPU build on a machine without a driver is no problem.
    assert len(problems()) == (build is not None)


def test_a_partly_invalid_variable_is_a_problem(machine, monkeypatch):
    machine(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,junk")
    (problem,) = problems()
    assert "'junk' names no GPU" in problem
    assert [device["index"] for device in CUDAAccelerator.diagnose()["devices"]] == [0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")
def test_the_diagnosis_works_on_this_machine():
    assert CUDAAccelerator.diagnose()["devices"] == []
    problems()
    assert not torch.cuda.is_initialized()


def test_a_mig_instance_has_its_place(machine):
    machine(FakeGPU("GPU-a", instances=[FakeGPU("MIG-a", "NVIDIA H200 MIG 1g.18gb", gi=3, ci=1)]))
    (device,) = CUDAAccelerator.diagnose()["devices"]
    assert device["mig"] == "GPU instance 3, compute instance 1 of GPU 0 (NVIDIA H200)"
    assert problems() == []


def test_the_diagnosis_never_raises(machine, monkeypatch):
    fake = machine(1)
    monkeypatch.setattr(fake, "nvmlDeviceGetMemoryInfo", lambda *arguments, **more: "nonsense")
    assert "NVML returned an unexpected value" in problems()[0]
    of_gpus = {name for name in dir(fake) if name.startswith("nvmlDevice")}
    for name in sorted(of_gpus - {"nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"}):
        machine(FakeGPU("GPU-a", errors={name: pynvml.NVML_ERROR_UNKNOWN}))
        problems()
