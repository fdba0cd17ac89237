"""unavailable() and diagnose(): the first thing that is in the way, and everything that is wrong."""

import json

import pynvml
import pytest
import torch

from geartrain_cuda import CUDAAccelerator

from .fake_pynvml import MIB, FakeGPU

KEYS = [
    "index",
    "name",
    "uuid",
    "memory_used_mib",
    "memory_total_mib",
    "compute_mode",
    "processes",
    "mig",
]
LOST = {"nvmlDeviceGetHandleByIndex": pynvml.NVML_ERROR_GPU_IS_LOST}

# --- unavailable ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")
def test_a_cpu_build_of_torch_is_named():
    reason = CUDAAccelerator.unavailable()
    assert reason.startswith(f"torch {torch.__version__} is built without CUDA. Fix: ")


def test_gpus_that_are_there_can_be_used(machine):
    machine(2)
    assert CUDAAccelerator.unavailable() is None


@pytest.mark.parametrize(
    "error", [pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_LIBRARY_NOT_FOUND]
)
def test_nvmls_reason(machine, counts, error):
    machine(2, error=error)
    counts(0)
    assert CUDAAccelerator.unavailable().startswith("NVML: ")
    assert CUDAAccelerator.device_count() == 0
    counts(2)  # CUDA works where NVML does not
    assert CUDAAccelerator.unavailable() is None
    assert CUDAAccelerator.device_count() == 2


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("", "CUDA_VISIBLE_DEVICES='' shows none of the 2 GPUs"),
        ("-1", "CUDA_VISIBLE_DEVICES='-1' shows none"),
        ("7", "'7' names no GPU"),
    ],
)
def test_a_variable_that_hides_all(machine, monkeypatch, variable, words):
    machine(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert words in CUDAAccelerator.unavailable()
    assert "Fix: " in CUDAAccelerator.unavailable()
    (problem,) = CUDAAccelerator.diagnose()["problems"]
    assert words in problem


def test_no_gpu_at_all(machine):
    machine()
    assert CUDAAccelerator.unavailable().startswith(
        "NVML: the driver (580.65.06) shows no GPU. Fix: "
    )


def test_mig_mode_without_instances(machine):
    machine(FakeGPU("GPU-a", instances=[]))
    assert "are in MIG mode and have no instance. Fix: " in CUDAAccelerator.unavailable()


def test_one_lost_gpu_of_two_is_not_the_end(machine):
    machine(FakeGPU("GPU-a", errors=LOST), FakeGPU("GPU-b"))
    assert CUDAAccelerator.unavailable() is None
    machine(FakeGPU("GPU-a", errors=LOST))
    assert "GPU is lost" in CUDAAccelerator.unavailable()


def test_rocm_is_asked_through_torch(machine, counts, monkeypatch):
    machine(2)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.version, "cuda", None)
    counts(0)
    assert "built for ROCm" in CUDAAccelerator.unavailable()
    counts(1)
    assert CUDAAccelerator.unavailable() is None


# --- diagnose ------------------------------------------------------------------------------------------------------------


def problems():
    report = CUDAAccelerator.diagnose()
    json.dumps(report)  # doctor --json prints it
    assert list(report) == ["facts", "devices", "problems"]
    assert all(list(device) == KEYS for device in report["devices"])
    assert all("Fix: " in problem for problem in report["problems"])
    return report["problems"]


def test_a_machine_in_order(machine):
    machine(FakeGPU("GPU-a", processes=[(1, 300 * MIB)]), FakeGPU("GPU-b"), names={1: "python"})
    report = CUDAAccelerator.diagnose()
    assert problems() == []
    facts = report["facts"]
    assert (facts["driver"], facts["driver_cuda"], facts["torch_cuda"], facts["nvml"]) == (
        "580.65.06",
        "13.0",
        "13.0",
        "ok",
    )
    assert facts["torch"] == torch.__version__
    assert {"cudnn", "nccl", "cuda_visible_devices", "torch_hip"} <= set(facts)
    values = [
        0,
        "NVIDIA H200",
        "GPU-a",
        1000,
        143771,
        "default",
        [{"pid": 1, "name": "python", "memory_mib": 300}],
        None,
    ]
    assert report["devices"][0] == dict(zip(KEYS, values, strict=True))


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        (
            {"mode": pynvml.NVML_COMPUTEMODE_PROHIBITED},
            "mode PROHIBITED). Fix: nvidia-smi -i 0 -c DEFAULT",
        ),
        ({"errors": LOST}, "GPU 0 (name unknown): GPU is lost. Fix: "),
        (
            {"errors": {"nvmlDeviceGetMemoryInfo": pynvml.NVML_ERROR_GPU_IS_LOST}},
            "GPU 0 (NVIDIA H200): GPU is lost",
        ),
        ({"ecc": (5, 0)}, None),
        ({"ecc": (5, 2)}, "had 2 memory errors that ECC could not correct"),
        (
            {"clock_reasons": pynvml.nvmlClocksEventReasonHwThermalSlowdown},
            "is slowed down (thermal)",
        ),
        ({"clock_reasons": pynvml.nvmlClocksEventReasonSwPowerCap}, None),
    ],
)
def test_what_is_wrong_with_a_gpu(machine, gpu, words):
    machine(FakeGPU("GPU-a", **gpu))
    found = problems()
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


@pytest.mark.parametrize(
    ("driver", "built", "too_old"),
    [(12020, "12.8", False), (12090, "13.0", True), (13000, "12.8", False), (11040, "12.1", True)],
)
def test_a_driver_too_old_for_torch(machine, monkeypatch, driver, built, too_old):
    machine(1, cuda=driver)
    monkeypatch.setattr(torch.version, "cuda", built)
    assert [f"torch is built for CUDA {built}" in problem for problem in problems()] == [
        True
    ] * too_old


@pytest.mark.parametrize(
    ("capability", "right"),
    [
        ((9, 0), True),
        ((8, 0), True),
        ((8, 6), True),
        ((10, 0), True),
        ((7, 5), False),
        ((5, 0), False),
    ],
)
def test_a_gpu_for_which_torch_has_no_kernels(machine, monkeypatch, capability, right):
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90", "compute_90"])
    machine(FakeGPU("GPU-a", capability=capability))
    assert (problems() == []) == right


def test_kernels_for_one_model_alone_serve_no_newer_one(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_100a", "sm_90a"])
    machine(FakeGPU("GPU-a", capability=(10, 3)))
    assert "compute capability 10.3" in problems()[0]
    machine(FakeGPU("GPU-a", capability=(10, 0)))
    assert problems() == []


def test_a_driver_without_a_torch_that_uses_it(machine, monkeypatch):
    machine(1)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in problems()[0]


@pytest.mark.parametrize("build", [None, "13.0"])
def test_without_nvml(machine, monkeypatch, build):
    machine(error=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    monkeypatch.setattr(torch.version, "cuda", build)
    report = CUDAAccelerator.diagnose()
    assert report["facts"]["nvml"] == "NVML: Driver Not Loaded"
    assert report["devices"] == []
    assert len(problems()) == (
        build is not None
    )  # a CPU build on a machine without a driver is in order


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs here")
def test_on_this_machine_as_it_is():
    assert CUDAAccelerator.diagnose()["devices"] == []
    problems()
    assert not torch.cuda.is_initialized()


def test_a_variable_that_names_nothing(machine, monkeypatch):
    machine(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,junk")
    (problem,) = problems()
    assert "'junk' names no GPU" in problem
    assert [device["index"] for device in CUDAAccelerator.diagnose()["devices"]] == [0]


def test_different_models(machine):
    machine(FakeGPU("GPU-a", "NVIDIA T4"), FakeGPU("GPU-b"))
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in problems()[0]


def test_mig(machine):
    machine(FakeGPU("GPU-a", instances=[FakeGPU("MIG-a", "NVIDIA H200 MIG 1g.18gb", gi=3, ci=1)]))
    (device,) = CUDAAccelerator.diagnose()["devices"]
    assert device["mig"] == "GPU instance 3, compute instance 1 of GPU 0 (NVIDIA H200)"
    assert problems() == []


def test_a_lost_instance(machine):
    machine(
        FakeGPU(
            "GPU-a",
            instances=[
                FakeGPU("MIG-a", errors={"nvmlDeviceGetMemoryInfo": pynvml.NVML_ERROR_GPU_IS_LOST})
            ],
        )
    )
    assert "MIG instance 0 of GPU 0 (NVIDIA H200): GPU is lost" in problems()[0]


def test_nothing_that_nvml_does_makes_it_raise(machine, monkeypatch):
    fake = machine(1)
    monkeypatch.setattr(fake, "nvmlDeviceGetMemoryInfo", lambda *arguments, **more: "nonsense")
    assert "NVML returned an unexpected value" in problems()[0]
    for name in [
        name
        for name in dir(fake)
        if name.startswith("nvmlDevice")
        and name not in ("nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex")
    ]:
        machine(FakeGPU("GPU-a", errors={name: pynvml.NVML_ERROR_UNKNOWN}))
        problems()
