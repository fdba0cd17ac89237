"""Queries of NVML, and the result of each of its errors."""

import os
import sys

import pynvml
import pytest
import torch

from geartrain_cuda.nvml import Process, Unavailable, session

from .fake_pynvml import MIB, FakeGPU

ERRORS = sorted(value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_"))


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
