"""The batch-size finder: its results, also when the process really runs out of memory."""

import gc
import os
import subprocess
import sys
import textwrap
import weakref

import pytest
import torch
from small_models import Stream, loader, samples, trainer
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain import TrainingError, UsageError
from geartrain.tuning import Tuner
from geartrain_tools.tuner.batch_size import is_out_of_memory

from .cases import Data, Never, Room, Watch, scale, snapshot

#: Room for 20 samples.
SEARCHES = [
    ("power", {}, 16, [2, 4, 8, 16, 32], "32 does not run"),
    ("binsearch", {}, 20, [2, 4, 8, 16, 32, 24, 20, 22, 21], "21 does not run"),
    ("power", {"init_val": 450}, 14, [450, 225, 112, 56, 28, 14], "28 does not run"),
    (
        "binsearch",
        {"init_val": 112},
        20,
        [112, 56, 28, 14, 21, 17, 19, 20],
        "21 does not run",
    ),
    ("binsearch", {"max_trials": 6}, 16, [2, 4, 8, 16, 32, 24], "6 sizes were tried"),
]


@pytest.mark.parametrize(("mode", "arguments", "expected", "tried", "reason"), SEARCHES, ids=str)
def test_search(mode, arguments, expected, tried, reason):
    data = Data()
    found, sizes, tuner = scale(Room(20), data, mode=mode, **arguments)
    assert (found, sizes) == (expected, tried)
    assert reason in tuner.reason
    assert (data.batch_size, data.hparams.batch_size) == (expected, expected)
    for trial in tuner.trials:
        assert trial.ran == (trial.batch_size <= 20)
        assert (
            (trial.samples_per_second or 0) > 0 if trial.ran else trial.samples_per_second is None
        )
        assert trial.error == ("" if trial.ran else f"no room for {trial.batch_size}")


@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_the_search_ends_at_the_size_of_the_data(mode):
    found, sizes, tuner = scale(Room(10**6), Data(n=37), mode=mode)
    assert (found, sizes) == (37, [2, 4, 8, 16, 32, 37])
    assert tuner.reason == "the data has only 37 samples"
    assert scale(Room(10**6), Data(n=37), mode=mode, init_val=50)[0] == 37


def test_without_a_length_the_search_ends_at_a_batch_that_is_not_full():
    class Streams(Room):
        batch_size = 4

        def train_dataloader(self):
            return Stream(
                [samples(self.batch_size)[:] if self.batch_size <= 20 else samples(20)[:]]
            )

    tuner = Tuner(trainer())
    module = Streams(10**6)
    assert tuner.scale_batch_size(module) == module.batch_size == 20
    assert [trial.batch_size for trial in tuner.trials] == [2, 4, 8, 16, 32]


def test_not_even_one_sample():
    module, data = Room(0), Data()
    with pytest.raises(
        TrainingError, match=r"no batch size runs: 1 ran out of memory too \(no room for 1\)"
    ):
        scale(module, data)
    assert data.batch_size == 5


def test_each_trial_is_so_many_steps_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lengths = []

    class Counts(Room):
        def __init__(self):
            super().__init__()
            self.steps = 0

        def training_step(self, batch, batch_idx):
            self.steps += 1
            lengths.append((len(batch[0]), self.steps))
            return super().training_step(batch, batch_idx)

    module, data, watch = Counts(), Data(), Watch()
    before, drawn = snapshot(module), torch.get_rng_state().tolist()
    scale(
        module,
        data,
        {"plugins": [watch], "output": "out", "limit_train_batches": 0.06},
        init_val=50,
        steps_per_trial=4,
    )
    assert lengths == [
        *[(50, i) for i in (1, 2, 3, 4)],
        *[(100, i) for i in (1, 2, 3, 4)],
        (200, 1),
    ]
    assert snapshot(module) == before
    assert torch.get_rng_state().tolist() == drawn
    assert list(tmp_path.iterdir()) == []


def test_other_errors_are_raised_unchanged():
    module, data = Room(error=KeyError), Data()
    before = snapshot(module)
    with pytest.raises(KeyError, match="no room for 128"):
        scale(module, data)
    assert snapshot(module) == before
    assert (data.batch_size, data.hparams.batch_size) == (5, 5)


def test_a_failed_trial_keeps_nothing_alive():
    alive = []

    class Grows(Room):
        def training_step(self, batch, batch_idx):
            gc.disable()
            activations = torch.zeros(len(batch[0]), 10)
            assert [ref() for ref in alive if ref() is not None] == []
            if batch_idx == 0:
                alive.append(weakref.ref(activations))
            activations.cycle = [activations] if len(batch[0]) > 20 else None
            return super().training_step(batch, batch_idx)

    try:
        assert scale(Grows(20), mode="binsearch", steps_per_trial=1)[0] == 20
    finally:
        gc.enable()
    assert len(alive) == 9


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    MemoryError(),
    OSError(12, "Cannot allocate memory"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 4 bytes."
    ),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4 bytes."),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("MPS backend out of memory (MPS allocated: 1.00 GB)"),
    RuntimeError("std::bad_alloc"),
]
ANOTHER = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasSgemm"),
    ValueError("out of memory"),
    OSError(2, "No such file"),
    KeyError("memory"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=str)
def test_out_of_memory(error):
    assert is_out_of_memory(error)
    wrapped = TrainingError("the batch could not be made")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped)


@pytest.mark.parametrize("error", ANOTHER, ids=str)
def test_another_error(error):
    assert not is_out_of_memory(error)


def test_torchs_error_is_out_of_memory():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)


@pytest.mark.end_to_end
def test_memory_that_really_runs_out():
    """In a process limited to 256 MiB more than torch needs; a sample takes 1 MiB or more."""
    program = """
        import resource, sys
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset
        import geartrain as gt
        from geartrain.tuning import Tuner

        class Wide(gt.Module):
            batch_size = 1
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 2**18)
            def training_step(self, batch, batch_idx):
                return self.layer(batch[0]).square().mean()
            def train_dataloader(self):
                return DataLoader(TensorDataset(torch.randn(4096, 4)), batch_size=self.batch_size)
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        torch.set_num_threads(1)
        options = dict(accelerator="cpu", enable_progress_bar=False, max_steps=2)
        gt.Trainer(**options).fit(Wide())  # what torch loads and allocates at first
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
        found = {}
        for mode in ("power", "binsearch"):
            module = Wide()
            before = {name: value.clone() for name, value in module.state_dict().items()}
            tuner = Tuner(gt.Trainer(**options))
            found[mode] = tuner.scale_batch_size(module, mode=mode, init_val=16, steps_per_trial=2)
            assert module.batch_size == found[mode]
            after = module.state_dict()
            assert all(torch.equal(value, before[name]) for name, value in after.items())
            assert any("allocate memory" in trial.error for trial in tuner.trials), tuner.trials
            gt.Trainer(**options).fit(module)  # the result runs after all failures
            del before
        module.batch_size = 2 * found["binsearch"]
        try:
            gt.Trainer(**options).fit(module)
        except RuntimeError as error:
            assert "allocate memory" in str(error), error
        else:
            raise SystemExit("twice the size runs too")
        print(found["power"], found["binsearch"])
    """
    if sys.platform != "linux":
        pytest.skip("needs RLIMIT_AS and /proc")
    # Freed memory that glibc keeps would count as used, and differ from trial to trial.
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_ARENA_MAX": "1",
    }
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    power, binsearch = map(int, done.stdout.split())
    # A sample takes 1 MiB in the output, and 1 to 2 MiB more in backward.
    assert power & (power - 1) == 0
    assert 8 <= power <= binsearch < 2 * power
    assert binsearch < 256


def test_the_batch_size_is_found_in_data_module_and_module():
    class Both(Room):
        def __init__(self, batch_size=3):
            super().__init__(room=10)
            self.batch_size = batch_size

        def train_dataloader(self):
            return DataLoader(samples(1000), batch_size=self.batch_size)

    class Only(Room):
        def train_dataloader(self):
            return DataLoader(samples(1000), batch_size=self.trainer.datamodule.batch_size)

    class Other(gt.DataModule):
        def __init__(self, batch_size=1):
            self.batch_size = batch_size

    class Hyper(gt.DataModule):
        def __init__(self, size=1):
            pass

        def train_dataloader(self):
            return DataLoader(samples(1000), batch_size=self.hparams.size)

    module = Both()
    assert (
        Tuner(trainer()).scale_batch_size(module)
        == module.batch_size
        == module.hparams.batch_size
        == 8
    )
    module, data = Both(), Data()
    assert scale(module, data)[0] == data.batch_size == 8
    assert module.batch_size == 3
    module, data = Both(), Other()
    assert scale(module, data)[0] == module.batch_size == 8
    data = Other()
    assert scale(Only(10), data)[0] == data.batch_size == 8
    data = Hyper()
    assert scale(Room(10), data, batch_arg_name="size")[0] == data.hparams.size == 8


def test_a_batch_size_that_the_loader_ignores_is_refused():
    class Fixed(Data):
        def train_dataloader(self):
            return DataLoader(samples(1000), batch_size=32)

    class FixedStream(Data):
        def train_dataloader(self):
            return Stream([samples(32)[:]])

    for data in (Fixed(), FixedStream()):
        says = (
            rf"{type(data).__name__}\.batch_size is 2, and the training loader has batches of 32"
            r".*batch_size=self\.batch_size"
        )
        with pytest.raises(UsageError, match=says):
            scale(Room(), data)
        assert data.batch_size == 5


class NoSize(gt.DataModule):
    def train_dataloader(self):
        raise AssertionError("something was started")


class Fixed(Data):
    batch_size = property(lambda self: 4)

    def __init__(self):
        pass


BATCH_REFUSALS = [
    ({"mode": "bisect"}, {}, "'power' or 'binsearch'"),
    ({"init_val": 0}, {}, "init_val=0 must be a whole number, at least 1"),
    ({"max_trials": True}, {}, "max_trials=True"),
    ({"steps_per_trial": 1.5}, {}, r"steps_per_trial=1\.5"),
    (
        {"data": NoSize()},
        {},
        "there is no 'batch_size' to set on NoSize and Never. Fix: self.batch_size",
    ),
    ({"data": Fixed()}, {}, r"Fixed\.batch_size cannot be set.*Fix: use an attribute"),
    ({"batch_arg_name": "size"}, {}, "there is no 'size'"),
    ({}, {"fast_dev_run": True}, "fast_dev_run"),
    (
        {"data": loader()},
        {},
        "a loader that is made already has its batch size. Fix: train_dataloader",
    ),
    ({"data": Data(), "datamodule": Data()}, {}, "two DataModules are given"),
]


@pytest.mark.parametrize(
    ("arguments", "options", "says"), BATCH_REFUSALS, ids=[words for _, _, words in BATCH_REFUSALS]
)
def test_scale_batch_size_refuses(arguments, options, says):
    with pytest.raises(UsageError, match=says):
        scale(Never(), options=options, **arguments)


def test_progress_is_one_line_a_trial(capsys):
    scale(Room(10), options={"enable_progress_bar": True})
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"batch size {n}" for n in (2, 4, 8, 16)]
    assert lines[0].endswith("samples/s")
    assert lines[-1] == "batch size 16: out of memory"
