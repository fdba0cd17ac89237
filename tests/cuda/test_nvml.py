"""Queries of NVML, and the result of each of its errors."""

import os
import sys

import pynvml
import pytest
import torch

from geartrain_cuda.nvml import Process, Unavailable, session

from .fake_pynvml import MIB, FakeGPU

ERRORS = sorted(value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_"))
LOST = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED)
UNSUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED
#: Function -> (the query that calls it, the result without an error).
FIGURES = {
    "nvmlDeviceGetUUID": (lambda gpu: gpu.uuid, "GPU-1"),
    "nvmlDeviceGetName": (lambda gpu: gpu.name, "NVIDIA H200"),
    "nvmlDeviceGetComputeRunningProcesses": (lambda gpu: gpu.processes(), []),
    "nvmlDeviceGetComputeMode": (lambda gpu: gpu.compute_mode(), "default"),
    "nvmlDeviceGetMemoryInfo": (lambda gpu: gpu.memory(), (1000, 143771)),
    "nvmlDeviceGetMigMode": (lambda gpu: gpu.in_mig_mode(), False),
}


def test_without_a_driver_the_real_library_is_missing():
    if torch.cuda.is_available():
        pytest.skip("this machine has a driver")
    with (
        pytest.raises(Unavailable, match=r"^NVML: (libnvidia-ml.so.1 not found|Driver Not Loaded)"),
        session(),
    ):
        pass


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "NVML: Driver Not Loaded"),
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "libnvidia-ml.so.1 not found. Fix: install the NV"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "Fix: restart the machine"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "NVML: Insufficient Permissions"),
        *[(error, "NVML: ") for error in ERRORS],
    ],
)
def test_every_error_of_init_is_the_reason(machine, error, reason):
    fake = machine(1, error=error)
    with pytest.raises(Unavailable) as caught, session():
        pass
    assert reason in str(caught.value)
    assert fake.depth == 0


def test_without_pynvml_the_fix_is_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(Unavailable, match="pip install nvidia-ml-py"), session():
        pass


def test_every_session_ends_also_after_an_error(machine):
    fake = machine(1)
    with session() as outer:
        with pytest.raises(KeyError), session():
            raise KeyError
        # NVML is still open after the end of the inner session.
        assert outer.gpus()[0].memory() == (1000, 143771)
    assert fake.depth == 0


@pytest.mark.parametrize(
    ("function", "error"),
    [*((name, UNSUPPORTED) for name in FIGURES), *(("nvmlDeviceGetUUID", e) for e in ERRORS)],
)
def test_an_error_of_one_query_gives_none_and_does_not_stop_others(machine, function, error):
    machine(FakeGPU("GPU-1", errors={function: error}))
    with session() as nvml:
        (gpu,) = nvml.gpus()
        answers = {name: ask(gpu) for name, (ask, _) in FIGURES.items()}
        assert gpu.error == (str(pynvml.NVMLError(error)) if error in LOST else None)
    assert answers.pop(function) in (None, False)
    assert answers == {name: right for name, (_, right) in FIGURES.items() if name != function}


def test_a_gpu_without_a_handle_keeps_its_place(machine):
    error = pynvml.NVML_ERROR_UNKNOWN
    without = FakeGPU("GPU-2", errors={"nvmlDeviceGetHandleByIndex": error})
    machine(FakeGPU("GPU-1"), without, FakeGPU("GPU-3"))
    with session() as nvml:
        gpus = nvml.gpus()
        assert [gpu.uuid for gpu in gpus] == ["GPU-1", None, "GPU-3"]
        lost = gpus[1]
        assert lost.error == str(pynvml.NVMLError(error))
        assert (lost.processes(), lost.memory(), lost.compute_mode()) == (None, None, None)
        assert not lost.in_mig_mode()


def test_an_old_driver_counts_its_reserved_memory_as_used(machine):
    machine(FakeGPU("GPU-1", errors={"v2": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}))
    with session() as nvml:
        assert nvml.gpus()[0].memory() == (1500, 143771)


def test_processes_have_names_and_memory_if_nvml_knows_them(machine):
    machine(FakeGPU("GPU-1", processes=[(7, 300 * MIB), (8, None)]), names={7: "python"})
    with session() as nvml:
        found = nvml.gpus()[0].processes()
    assert found == [Process(7, "python", 300), Process(8, None, None)]
    assert [str(process) for process in found] == ["pid 7 python, 300 MiB", "pid 8 (name unknown)"]


@pytest.mark.parametrize(
    ("mode", "word"),
    [
        (pynvml.NVML_COMPUTEMODE_DEFAULT, "default"),
        (pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS, "exclusive_process"),
        (pynvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD, "exclusive_process"),
        (pynvml.NVML_COMPUTEMODE_PROHIBITED, "prohibited"),
        (99, None),
    ],
)
def test_compute_modes_have_names(machine, mode, word):
    machine(FakeGPU("GPU-1", mode=mode))
    with session() as nvml:
        assert nvml.gpus()[0].compute_mode() == word


def test_a_function_that_pynvml_lacks_gives_none(machine):
    fake = machine(1)
    with session() as nvml:
        assert nvml.gpus()[0].ask("nvmlDeviceGetSomethingNew") is None
    assert "nvmlDeviceGetSomethingNew" not in fake.calls


def test_versions_of_the_driver_are_none_if_unknown(machine):
    machine(1, driver="535.129.03", cuda=12020)
    with session() as nvml:
        assert (nvml.driver(), nvml.driver_cuda()) == ("535.129.03", (12, 2))
    functions = ("nvmlSystemGetDriverVersion", "nvmlSystemGetCudaDriverVersion")
    machine(1, errors=dict.fromkeys(functions, pynvml.NVML_ERROR_UNKNOWN))
    with session() as nvml:
        assert (nvml.driver(), nvml.driver_cuda()) == (None, None)


def test_a_handle_is_refused_after_its_session(machine):
    machine(1)
    with session() as nvml:
        (gpu,) = nvml.gpus()
    with pytest.raises(RuntimeError, match="closed session"):
        gpu.memory()


def test_a_handle_is_refused_in_a_forked_process(machine):
    machine(1)
    with session() as nvml:
        (gpu,) = nvml.gpus()
        pid = os.fork()
        if pid == 0:
            try:
                gpu.memory()
            except RuntimeError:
                os._exit(3)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        assert gpu.memory() == (1000, 143771)
