"""find_usable_cuda_devices: occupied GPUs, their processes, and probes without NVML's answer."""

import os
import subprocess
import sys

import pynvml
import pytest
import torch

import geartrain as gt
from geartrain import UsageError
from geartrain.accelerators import find_usable_cuda_devices
from geartrain_cuda import CUDAAccelerator, usable

from .fake_pynvml import MIB, FakeGPU

OTHER = 1  # the pid of init, which is never a descendant of this process
NO_LIST = {"nvmlDeviceGetComputeRunningProcesses": pynvml.NVML_ERROR_NO_PERMISSION}


def busy(letter="b", **more):
    return FakeGPU(f"GPU-{letter}", processes=[(OTHER, 4000 * MIB)], **more)


@pytest.fixture
def probe(monkeypatch):
    """``probe(folder, "GPU-b")`` lets allocations fail on these GPUs.

    It returns a function that reads the GPUs of all probes.
    """

    def fails(folder, *names):
        code = "import os; "
        code += "variables = ('HIP_VISIBLE_DEVICES', 'CUDA_VISIBLE_DEVICES'); "
        code += "name, = [os.environ[n] for n in variables if n in os.environ]; "
        code += "open({!r}, 'a').write(name + '\\n'); {}"
        does = "error = 'RuntimeError: CUDA error: all CUDA-capable devices are busy'; "
        does += f"raise SystemExit(error if name in {names!r} else 0)"
        log = folder / "probes"
        log.touch()
        monkeypatch.setattr(usable, "_PROBE", code.format(str(log), does))
        return lambda: log.read_text().split()

    return fails


@pytest.mark.parametrize(
    ("n", "message"),
    [
        *((n, "number of GPUs, or -1") for n in (-2, 1.0, "2", True, None)),
        (5, r"\(5\): only 2 GPUs are visible"),
    ],
)
def test_an_invalid_number_of_gpus_is_refused(machine, n, message):
    machine(2)
    with pytest.raises(ValueError, match=message):
        find_usable_cuda_devices(n)


def test_free_gpus_are_found_in_order(machine):
    fake = machine(4)
    assert find_usable_cuda_devices(0) == []
    assert fake.calls == []
    assert find_usable_cuda_devices(2) == [0, 1]
    for arguments in ((4,), (), (-1,)):
        assert find_usable_cuda_devices(*arguments) == [0, 1, 2, 3]


def test_busy_gpus_are_skipped_and_no_probe_runs(machine, probe, tmp_path):
    probes = probe(tmp_path)
    machine(FakeGPU("GPU-a"), busy(), FakeGPU("GPU-c"))
    assert find_usable_cuda_devices(2) == [0, 2]
    assert find_usable_cuda_devices() == [0, 2]
    machine(busy("a"), busy("b"))
    assert find_usable_cuda_devices() == []
    assert probes() == []


def test_the_error_for_too_few_gpus_names_gpus_and_processes(machine):
    users = [(OTHER, 4000 * MIB), (2**22, None)]
    taken = FakeGPU("GPU-c", processes=users, mode=pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)
    machine(busy("a"), FakeGPU("GPU-b"), taken, names={OTHER: "/usr/bin/python3"})
    with pytest.raises(RuntimeError) as caught:
        find_usable_cuda_devices(2)
    for word in (
        "only 1 of 3 GPUs are free ([1])",
        "cuda:0, GPU 0 (NVIDIA H200): pid 1 /usr/bin/python3, 4000 MiB",
        "cuda:2, GPU 2 (NVIDIA H200): pid 1 /usr/bin/python3, 4000 MiB and "
        "pid 4194304 (name unknown) (exclusive mode)",
        "Fix: ",
    ):
        assert word in str(caught.value)


def test_indices_count_the_entries_of_the_variable(machine, monkeypatch):
    machine(busy("a"), FakeGPU("GPU-b"), busy("c"), FakeGPU("GPU-d"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,2,1")
    assert find_usable_cuda_devices() == [0, 2]
    with pytest.raises(RuntimeError, match=r"cuda:1, GPU 2 "):
        find_usable_cuda_devices(3)


def test_this_process_and_its_descendants_do_not_occupy_a_gpu(machine):
    # Both processes wait until their input is closed.
    code = "import os, sys; pid = os.fork(); pid and print(pid, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        grandchild = int(child.stdout.readline())
        ours = [(os.getpid(), 1), (child.pid, 1), (grandchild, 1)]
        machine(FakeGPU("GPU-a", processes=ours), FakeGPU("GPU-b", processes=[(os.getppid(), 1)]))
        try:
            assert find_usable_cuda_devices() == [0]
        finally:
            child.communicate()


@pytest.mark.parametrize(
    ("gpu", "reason"),
    [
        ({"mode": pynvml.NVML_COMPUTEMODE_PROHIBITED}, "PROHIBITED; nvidia-smi -c DEFAULT"),
        ({"errors": {"nvmlDeviceGetHandleByIndex": pynvml.NVML_ERROR_GPU_IS_LOST}}, "GPU is lost"),
        ({"errors": {"nvmlDeviceGetUUID": pynvml.NVML_ERROR_GPU_IS_LOST}}, "GPU is lost"),
    ],
)
def test_prohibited_and_lost_gpus_are_skipped(machine, gpu, reason):
    machine(FakeGPU("GPU-a", **gpu), FakeGPU("GPU-b"))
    assert find_usable_cuda_devices() == [1]
    with pytest.raises(RuntimeError, match=reason):
        find_usable_cuda_devices(2)


def test_an_exclusive_gpu_without_a_process_is_free(machine):
    machine(FakeGPU("GPU-a", mode=pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS))
    assert find_usable_cuda_devices() == [0]


def test_each_mig_instance_has_its_own_processes(machine):
    instances = [FakeGPU("MIG-a", gi=1, processes=[(OTHER, 1)]), FakeGPU("MIG-b", gi=2)]
    machine(FakeGPU("GPU-a", instances=instances))
    assert find_usable_cuda_devices() == [1]


# --- probes, if NVML does not know the processes --------------------------------------------------


def test_only_a_gpu_with_unknown_processes_is_probed(machine, probe, tmp_path):
    probes = probe(tmp_path, "GPU-b")
    machine(FakeGPU("GPU-a"), *(FakeGPU(f"GPU-{letter}", errors=NO_LIST) for letter in "bcd"))
    assert find_usable_cuda_devices(2) == [0, 2]
    assert probes() == ["GPU-b", "GPU-c"]  # GPU-d is not needed
    message = "cuda:1, GPU 1 .*: an allocation failed: RuntimeError: CUDA error: all CUDA-capable"
    with pytest.raises(RuntimeError, match=message):
        find_usable_cuda_devices(4)


@pytest.mark.parametrize(
    ("variable", "narrowed"), [(None, ["0", "1", "2"]), ("2, 0,GPU-x", ["2", "0", "GPU-x"])]
)
def test_without_nvml_each_gpu_is_probed(
    machine, counts, probe, tmp_path, monkeypatch, variable, narrowed
):
    probes = probe(tmp_path, "0")
    machine(error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    counts(3)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert find_usable_cuda_devices() == [index for index in range(3) if narrowed[index] != "0"]
    assert probes() == narrowed


def test_nvml_is_not_used_with_rocm(machine, counts, probe, tmp_path, monkeypatch):
    fake = machine(4)
    probe(tmp_path)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    counts(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert find_usable_cuda_devices() == [0]
    assert CUDAAccelerator.device_count() == 1
    assert fake.calls == []


@pytest.mark.parametrize(
    ("environ", "variable", "narrowed"),
    [
        ({}, "HIP_VISIBLE_DEVICES", ["0", "1"]),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, "CUDA_VISIBLE_DEVICES", ["2", "3"]),
        ({"HIP_VISIBLE_DEVICES": "2,3"}, "HIP_VISIBLE_DEVICES", ["2", "3"]),
        (
            {"HIP_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "0,1"},
            "HIP_VISIBLE_DEVICES",
            ["2", "3"],
        ),
    ],
)
def test_hips_variable_wins_over_cudas(
    machine, counts, tmp_path, monkeypatch, environ, variable, narrowed
):
    """As in HIP and in torch; a probe sees only this variable."""
    machine(0)
    counts(2)
    log = tmp_path / "probes"
    code = "import os; "
    code += "seen = {k: v for k, v in os.environ.items() if k.endswith('VISIBLE_DEVICES')}; "
    code += f"open({str(log)!r}, 'a').write(repr(seen) + '\\n')"
    monkeypatch.setattr(usable, "_PROBE", code)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert find_usable_cuda_devices() == [0, 1]
    assert log.read_text().splitlines() == [repr({variable: name}) for name in narrowed]


# --- counting in another process ------------------------------------------------------------------


@pytest.fixture
def counted(counts, monkeypatch, tmp_path):
    """Return a function that reads the number of processes that counted."""
    counts(0)
    code = f"open({str(tmp_path / 'log')!r}, 'a').write('x'); print('welcome'); import os; "
    code += "print(os.environ['CUDA_VISIBLE_DEVICES'].count(',') + 1)"
    monkeypatch.setattr(usable, "_COUNT", code)
    return lambda: len((tmp_path / "log").read_text())


def test_another_process_counts_once_for_each_value_of_the_variable(machine, counted, monkeypatch):
    machine(error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: pytest.fail("CUDA was initialized"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    for _ in range(3):
        assert CUDAAccelerator.unavailable() is None
        assert CUDAAccelerator.device_count() == 2
    assert counted() == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert CUDAAccelerator.device_count() == 3
    assert counted() == 2


def test_torch_counts_in_this_process_if_cuda_is_in_use(machine, counts, monkeypatch):
    machine(error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    counts(7)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert CUDAAccelerator.device_count() == 3


@pytest.mark.skipif(
    torch.version.cuda is not None or torch.version.hip is not None,
    reason="this torch is built for GPUs",
)
def test_no_process_is_started_if_torch_cannot_use_a_gpu(monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("a process was started"))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert CUDAAccelerator.device_count() == 0
    assert "built without CUDA" in CUDAAccelerator.unavailable()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a driver")
def test_no_process_is_started_without_a_driver(machine, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("a process was started"))
    machine(error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert CUDAAccelerator.device_count() == 0
    assert CUDAAccelerator.unavailable().startswith("NVML: ")


@pytest.mark.parametrize(
    ("code", "words"),
    [("raise SystemExit('broken')", "failed: broken"), ("print('x')", "torch printed 'x")],
)
def test_a_count_that_fails_is_a_warning(machine, counts, monkeypatch, code, words):
    machine(error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    counts(0)
    monkeypatch.setattr(usable, "_COUNT", code)
    with pytest.warns(UserWarning, match=rf"could not be counted: {words}.*Fix: "):
        assert CUDAAccelerator.device_count() == 0


@pytest.mark.end_to_end
@pytest.mark.skipif(torch.cuda.is_available(), reason="it counts more on a GPU")
def test_the_count_itself_runs_torch(machine, monkeypatch):
    monkeypatch.setattr(usable, "_can_have_any", lambda: True)
    assert usable.count_without_nvml() == 0


def test_a_probe_that_hangs_ends(machine, monkeypatch):
    machine(FakeGPU("GPU-a", errors=NO_LIST))
    monkeypatch.setattr(usable, "_PROBE", "import threading; threading.Event().wait()")
    monkeypatch.setattr(usable, "_PROBE_TIMEOUT", 0.5)
    with pytest.raises(RuntimeError, match=r"an allocation was not done after 0 s|after 1 s"):
        find_usable_cuda_devices(1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="its probe would succeed on a GPU")
def test_the_probe_itself_runs_torch_and_imports_no_file_of_the_current_folder(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torch.py").write_text("raise SystemExit('the wrong torch')")
    assert "CUDA" in usable.probe("0")


class Model(gt.Module):
    def training_step(self, batch, batch_idx): ...

    def configure_optimizers(self): ...


def test_counting_choosing_and_checking_create_no_context(machine, monkeypatch):
    for name in ("_lazy_init", "device_count"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("CUDA was initialized"))
    machine(FakeGPU("GPU-a"), busy(), FakeGPU("GPU-c"))
    assert CUDAAccelerator.unavailable() is None
    assert CUDAAccelerator.device_count() == 3
    assert find_usable_cuda_devices() == [0, 2]
    CUDAAccelerator.diagnose()
    plan = gt.Trainer(accelerator="auto", devices=2, strategy="dp", accelerator_options={}).plan
    assert (plan.accelerator.name, plan.devices) == ("cuda", (0, 1))
    options = {"accelerator_options": {"auto_select": True}}
    chosen = gt.Trainer(accelerator="cuda", devices=2, strategy="dp", **options)
    assert chosen.plan.devices == (0, 2)
    chosen.check(Model())
    with pytest.raises(UsageError, match=r"only 2 of 3 GPUs are free \(\[0, 2\]\).*pid 1"):
        gt.Trainer(accelerator="cuda", devices=3, strategy="dp", **options)


# --- auto_select ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "indices", "means"),
    [
        (2, [0, 1], [0, 2]),
        (" 1 ", [0], [0]),
        (-1, [0, 1, 2], [0, 2]),
        ("auto", [0, 1, 2], [0, 2]),
        ("-1", [0, 1, 2], [0, 2]),
        ([1], [1], [1]),
        ("1,", [1], [1]),
        (range(2), [0, 1], [0, 1]),
    ],
)
def test_auto_select_takes_free_gpus_for_a_number(machine, devices, indices, means):
    machine(FakeGPU("GPU-a"), busy(), FakeGPU("GPU-c"))
    assert CUDAAccelerator(auto_select=True).select_devices(devices, indices) == means
    assert CUDAAccelerator().select_devices(devices, indices) == indices


@pytest.mark.parametrize("devices", [3, "auto"])
def test_auto_select_that_finds_too_few_is_a_usage_error(machine, devices):
    machine(busy("a"), busy("b"), busy("c"))
    message = r"geartrain-cuda\[cuda\]: auto_select: .*only 0 of 3 GPUs are free.*pid 1"
    with pytest.raises(UsageError, match=message):
        CUDAAccelerator(auto_select=True).select_devices(devices, [0, 1, 2])
