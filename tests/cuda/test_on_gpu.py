"""Tests on a real GPU. All other tests in this folder run without one."""

import os
import subprocess
import sys
import threading

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt
from geartrain import hookimpl
from geartrain.callbacks import AsyncCheckpoint, ModelCheckpoint
from geartrain.module.nested import map_tensors, move
from geartrain_cuda import CUDAAccelerator, find_usable_cuda_devices
from geartrain_cuda.nvml import Unavailable, session
from geartrain_cuda.visible import view

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="this machine has no CUDA GPU, or torch is built without CUDA",
    ),
]


def no_nvml():
    try:
        with session():
            return False
    except Unavailable:
        return True


needs_nvml = pytest.mark.skipif(no_nvml(), reason="NVML cannot be used here")


class Net(gt.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        first, last = torch.nn.Linear(16, 32), torch.nn.Linear(32, 1)
        self.net = torch.nn.Sequential(first, torch.nn.Tanh(), last)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def loader(samples=256, batch_size=16, **options):
    x = torch.randn(samples, 16, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(dim=1, keepdim=True).sin())
    return DataLoader(data, batch_size=batch_size, **options)


def train(accelerator, plugins=(), data=None, **options):
    net = Net()
    options = {"max_epochs": 2, "strategy": "single", "plugins": list(plugins), **options}
    options["enable_progress_bar"] = False
    trainer = gt.Trainer(accelerator=accelerator, devices=1, **options)
    trainer.fit(net, data or loader(), loader(64))
    return net, trainer


@pytest.mark.parametrize("options", [{"prefetch": 0}, {}, {"prefetch": 3}, {"pin_memory": False}])
def test_a_training_has_the_same_result_as_on_the_cpu(options):
    net, trainer = train("cuda", accelerator_options={"matmul_precision": "highest", **options})
    expected, on_cpu = train("cpu")
    for found, right in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found.cpu(), right, rtol=1e-4, atol=1e-5)
    right = on_cpu.run.metrics["val_loss"]
    assert trainer.run.metrics["val_loss"] == pytest.approx(right, rel=1e-4)


def run_alone(code, *arguments, **environ):
    """Run a program in a process that has not used CUDA yet."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_nvml
def test_planning_creates_no_context():
    run_alone("""
import os, torch
import geartrain as gt
from geartrain_cuda import CUDAAccelerator, find_usable_cuda_devices
from geartrain_cuda.nvml import session

def mine():
    with session() as nvml:
        return [p.pid for gpu in nvml.gpus() for p in gpu.processes() or () if p.pid == os.getpid()]

assert CUDAAccelerator.unavailable() is None
count = CUDAAccelerator.device_count()
find_usable_cuda_devices()
CUDAAccelerator.diagnose()
assert gt.Trainer(accelerator="auto", devices=1).plan.accelerator.name == "cuda"
assert not torch.cuda.is_initialized()
assert mine() == []
pid = os.fork()  # a process that is forked now can use CUDA
if pid == 0:
    torch.zeros(1, device="cuda")
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert torch.cuda.device_count() == count
""")


@needs_nvml
@pytest.mark.parametrize("variable", [None, "0", "", "-1", "0,0", "0,junk", "9", "junk"])
def test_the_count_equals_cudas(variable):
    """CUDA counts in another process, because it reads the variable when it is initialized."""
    environ = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    code = (
        "import torch; print(torch._C._cuda_getDeviceCount()); "
        "from geartrain_cuda import CUDAAccelerator; print(CUDAAccelerator.device_count())"
    )
    cuda, ours = run_alone(code, **environ).split()
    assert ours == cuda


@needs_nvml
def test_indices_name_the_gpus_that_cuda_names():
    with session() as nvml:
        seen = view(nvml)
        if seen.order is not None:
            pytest.skip("GPUs of different models, in CUDA's order")
        uuids = [gpu.uuid for gpu in seen.devices]
    # torch returns the UUID without its prefix.
    torchs = [str(torch.cuda.get_device_properties(i).uuid) for i in range(len(uuids))]
    assert [uuid.partition("-")[2] for uuid in uuids] == torchs


@needs_nvml
def test_a_gpu_is_usable_until_another_process_uses_it():
    free = find_usable_cuda_devices()
    if not free:
        pytest.skip("every GPU is in use")
    index = free[0]
    torch.zeros(1, device=torch.device("cuda", index))
    with session() as nvml:
        if os.getpid() not in [p.pid for p in view(nvml).devices[index].processes() or ()]:
            pytest.skip("NVML does not list this process, as in some containers")
    assert index in find_usable_cuda_devices()  # this process's own context does not count
    code = f"import sys, torch; torch.zeros(1, device='cuda:{index}'); "
    code += "print('ready', flush=True); sys.stdin.read()"
    # In another session, and started by a process that ends: then it is no descendant of this one.
    start = "import subprocess, sys; "
    start += f"subprocess.Popen([sys.executable, '-c', {code!r}], start_new_session=True)"
    with subprocess.Popen(
        [sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as starter:
        try:
            assert starter.stdout.readline() == b"ready\n"
            with session() as nvml:
                pids = [p.pid for p in view(nvml).devices[index].processes() or ()]
            assert any(pid != os.getpid() for pid in pids)
            assert index not in find_usable_cuda_devices()
        finally:
            starter.communicate()  # closes the input, on which the other process waits


class SyncsAreErrors:
    """From the third step on, an operation that makes the CPU wait for the GPU raises an error."""

    @hookimpl(wrapper=True)
    def step(self, run, micro_batches):
        torch.cuda.set_sync_debug_mode("error" if run.step >= 2 else "default")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_step_does_not_wait_for_the_gpu():
    train("cuda", [SyncsAreErrors()], log_every_n_steps=1000, num_sanity_val_steps=0)


def test_reading_ahead_does_not_wait_for_the_gpu():
    class Watched(SyncsAreErrors):
        @hookimpl(wrapper=True)
        def device_batches(self, run, loader, stage):
            batches = yield

            def watched():
                for number in range(10**9):
                    torch.cuda.set_sync_debug_mode("error" if number >= 3 else "default")
                    try:
                        batch = next(batches)
                    except StopIteration:
                        return
                    finally:
                        torch.cuda.set_sync_debug_mode("default")
                    yield batch
                    del batch

            return watched()

    train("cuda", [Watched()], log_every_n_steps=1000, num_sanity_val_steps=0)


@pytest.mark.parametrize("prefetch", [1, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_large_batches_are_unchanged_on_a_slow_gpu(prefetch, workers):
    """Steps are slow on the GPU, the CPU is far ahead, and memory is reused immediately."""

    class Check(Net):
        def training_step(self, batch, batch_idx):
            torch.cuda._sleep(2_000_000)  # about a millisecond
            self.sums.append(batch[0].sum(dtype=torch.float64))
            return super().training_step([batch[0][:, :16], batch[1]], batch_idx)

    x = torch.randn(200 * 64, 4096, generator=torch.Generator().manual_seed(2))
    data = TensorDataset(x, x[:, :1].clone())
    net = Check()
    net.sums = []
    options = {"accelerator_options": {"prefetch": prefetch}, "strategy": "single"}
    options["enable_progress_bar"] = False
    trainer = gt.Trainer(accelerator="cuda", devices=1, max_epochs=1, **options)
    trainer.fit(net, DataLoader(data, batch_size=64, num_workers=workers, pin_memory=workers > 0))
    found = torch.stack(net.sums).cpu()
    expected = x.view(200, -1).sum(dim=1, dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_batches_are_pinned_and_on_the_gpu(monkeypatch, prefetch, pin_memory):
    batches, copied = [], []

    def watched(batch, device):
        map_tensors(batch, lambda tensor: copied.append((tensor.device.type, tensor.is_pinned())))
        return move(batch, device)

    class Look(Net):
        def training_step(self, batch, batch_idx):
            map_tensors(batch, lambda tensor: batches.append(tensor.device.type))
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr("geartrain_cuda.batches.move", watched)
    options = {
        "accelerator_options": {"prefetch": prefetch, "pin_memory": pin_memory},
        "enable_progress_bar": False,
    }
    gt.Trainer(accelerator="cuda", devices=1, max_steps=3, strategy="single", **options).fit(
        Look(), loader()
    )
    assert batches == ["cuda"] * 6  # x and y of three batches
    assert set(copied) == {("cpu", pin_memory)}
    assert len(copied) == 6


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("where", ["on the gpu", "pinned"])
def test_a_loader_may_refill_its_buffer(prefetch, where):
    """The GPU is far behind the CPU; batches must not change."""
    steps, size = 30, 2**22
    if where == "on the gpu":
        buffer = torch.empty(size, device="cuda")
    else:
        buffer = torch.empty(size).pin_memory()

    class Check(Net):
        def training_step(self, batch, batch_idx):
            torch.cuda._sleep(5_000_000)  # some milliseconds
            self.seen.append(torch.stack([batch.min(), batch.max()]))
            return self.net(batch[:16]).sum()

    def refills():
        for value in range(steps):
            yield buffer.fill_(value)

    net = Check()
    net.seen = []
    options = {"accelerator_options": {"prefetch": prefetch}, "strategy": "single"}
    options["enable_progress_bar"] = False
    gt.Trainer(accelerator="cuda", devices=1, max_epochs=1, **options).fit(net, refills())
    assert torch.stack(net.seen).tolist() == [[value, value] for value in range(steps)]


def test_processes_forked_after_counting_without_nvml_can_use_cuda():
    run_alone("""
import os, sys
sys.modules["pynvml"] = None
import torch
from geartrain_cuda import CUDAAccelerator, find_usable_cuda_devices

assert CUDAAccelerator.unavailable() is None
count = CUDAAccelerator.device_count()
find_usable_cuda_devices()
pid = os.fork()
if pid == 0:
    torch.zeros(1, device="cuda")
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert torch.cuda.device_count() == count > 0
""")


def precisions():
    """Return the precisions of float32 in torch's tree, or ``None`` if torch has no tree."""
    backends = torch.backends
    nodes = [backends, backends.cudnn, backends.cuda.matmul, backends.mkldnn.matmul]
    nodes += [backends.cudnn.conv, backends.cudnn.rnn]
    return [node.fp32_precision for node in nodes] if hasattr(backends, "fp32_precision") else None


def test_a_run_restores_the_settings():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    nodes, seen = precisions(), []

    class Look(Net):
        def on_train_start(self):
            seen.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark))

    options = {
        "accelerator_options": {"matmul_precision": "medium", "cudnn_benchmark": not before[1]},
        "enable_progress_bar": False,
    }
    gt.Trainer(accelerator="cuda", devices=1, max_steps=2, strategy="single", **options).fit(
        Look(), loader()
    )
    assert seen == [("medium", not before[1])]
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark) == before
    assert precisions() == nodes


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_run_restores_the_current_device():
    seen, before = [], torch.cuda.current_device()

    class Look(Net):
        def on_train_start(self):
            seen.append(torch.cuda.current_device())

    torch.cuda.set_device(1)
    try:
        options = {"max_steps": 2, "strategy": "single", "enable_progress_bar": False}
        gt.Trainer(accelerator="cuda", devices=[0], **options).fit(Look(), loader())
        assert seen == [0]
        assert torch.cuda.current_device() == 1
    finally:
        torch.cuda.set_device(before)


@needs_nvml
def test_a_thread_can_sample_figures():
    samples = []

    class Monitor:
        @hookimpl
        def on_run_end(self, run):
            for _ in range(2):
                thread = threading.Thread(
                    target=lambda: samples.append(CUDAAccelerator().device_stats(run))
                )
                thread.start()
                thread.join()

    train("cuda", [Monitor()], max_epochs=1)
    assert len(samples) == 2
    assert set(samples[0]) == set(samples[1])
    assert samples[0]["gpu0_memory_total_mib"] >= samples[0]["gpu0_memory_used_mib"] >= 0
    assert {"gpu0_torch_allocated_mib", "gpu0_torch_reserved_mib"} <= set(samples[0])
    assert all(value >= 0 for value in samples[0].values())


@needs_nvml
def test_the_diagnosis_names_every_gpu():
    report = CUDAAccelerator.diagnose()
    assert len(report["devices"]) == torch.cuda.device_count()
    assert report["facts"]["driver"]
    assert all("Fix: " in problem for problem in report["problems"])


class Keep:
    """Keep the weights after each step."""

    def __init__(self):
        self.weights = {}

    @hookimpl
    def on_step_end(self, run):
        state = run.module.state_dict()
        self.weights[run.step] = {name: value.clone() for name, value in state.items()}


def test_async_checkpoint_writes_the_weights_of_its_step(tmp_path):
    keep = Keep()
    every = ModelCheckpoint(
        dirpath=tmp_path,
        filename="{step}",
        monitor="step",
        mode="max",
        save_top_k=-1,
        every_n_train_steps=4,
    )
    train("cuda", [keep, every, AsyncCheckpoint()])
    files = sorted(tmp_path.glob("*.ckpt"))
    assert len(files) == 8
    for path in files:
        state = torch.load(path, weights_only=True)
        assert state["model"]["net.0.weight"].device.type == "cpu"
        for name, value in keep.weights[state["step"]].items():
            assert torch.equal(state["model"][name], value.cpu())
