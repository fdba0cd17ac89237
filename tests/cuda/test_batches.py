"""Batches that are copied ahead: their order, the streams, and the number of batches read."""

import gc
import warnings
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain.data.stage import Stage
from geartrain_cuda.batches import Prefetcher, most, pinned, stays

from .fake_streams import GPU, CPUBatch, Race

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    return GPU(monkeypatch)


class Plain(gt.Module):
    pass


OPTIONS = {"max_steps": -1, "accumulate_grad_batches": 1, "num_sanity_val_steps": 2}


def make_run(module=None, batches=None, *, stage="train", run_stage=None, index=0, step=0, **more):
    """Return a run; ``more`` are options of its plan."""
    options = SimpleNamespace(**{**OPTIONS, **more})
    run = SimpleNamespace(plan=SimpleNamespace(options=options), device=DEVICE, step=step)
    run.module, run.stage = module or Plain(), run_stage or stage
    run.stages, run.dataloader_idx = {stage: Stage(batches=batches or [None])}, index
    run.to_device = lambda batch: run.module.transfer_batch_to_device(batch, DEVICE, index)
    return run


def loader(gpu, count, read=None):
    for value in range(count):
        if read is not None:
            read.append(value)
        yield CPUBatch(gpu, value)


def prefetch(gpu, run, items, *, ahead=1, stage="train", prefetcher=None):
    return (prefetcher or Prefetcher(DEVICE, ahead, True)).batches(run, items, stage)


def step(gpu, batch):
    """Use a batch as a training step does, on the compute stream."""
    return batch.read()


# --- data and streams -----------------------------------------------------------------------------


def test_memory_is_reused(gpu):
    for batch in prefetch(gpu, make_run(), loader(gpu, 100), ahead=2):
        step(gpu, batch)
        del batch
    # Two ahead, the one in use, and the next one, which is copied before that one is freed.
    assert next(gpu.numbers) <= 4


def test_a_copy_runs_in_parallel_to_a_step(gpu):
    """The copy of the second batch does not wait for the first step."""
    batches = prefetch(gpu, make_run(), loader(gpu, 10))
    first = next(batches)
    side = gpu.streams[1]
    assert first.stream is side
    step(gpu, first)
    assert side.clock.get(gpu.compute, 0) < gpu.compute.clock[gpu.compute]


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_use_of_batches_is_free_of_races(data):
    """Steps keep batches for some time, read them again, validate in between, and end early."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        gpu, kept = GPU(monkeypatch), []
        prefetcher = Prefetcher(DEVICE, data.draw(st.integers(1, 4)), True)
        run = make_run()
        for _ in range(data.draw(st.integers(1, 3))):
            items = loader(gpu, data.draw(st.integers(0, 12)))
            batches = prefetch(gpu, run, items, prefetcher=prefetcher)
            for given_, batch in enumerate(batches):
                assert step(gpu, batch) == given_
                if data.draw(st.booleans()):
                    kept.append(batch)
                if kept and data.draw(st.booleans()):
                    kept.pop(data.draw(st.integers(0, len(kept) - 1))).read()
                if data.draw(st.integers(0, 4)) == 0:
                    inner, more = make_run(stage="validate"), {"prefetcher": prefetcher}
                    found = prefetch(gpu, inner, loader(gpu, 3), stage="validate", **more)
                    assert [step(gpu, one) for one in found] == [0, 1, 2]
                del batch
                if data.draw(st.integers(0, 9)) == 0:
                    batches.close()


@pytest.mark.parametrize("broken", ["side waits", "compute waits"])
def test_the_recorder_finds_a_missing_wait(gpu, monkeypatch, broken):
    """Without a wait, the tests above fail."""
    batches = prefetch(gpu, make_run(), loader(gpu, 20))
    stream = gpu.streams[1] if broken == "side waits" else gpu.compute
    monkeypatch.setattr(stream, "wait_event", lambda event: None)
    with pytest.raises(Race):  # noqa: PT012
        for batch in batches:
            step(gpu, batch)
            del batch


def test_batches_of_a_loader_on_the_gpu_are_copied(gpu):
    """A batch is in the compute stream's memory, which the copy reads on the side stream."""

    class OnGPU:
        def __iter__(self):
            for value in range(30):
                tensor = gpu.allocate()
                tensor.write(value)
                yield tensor

    for value, batch in enumerate(prefetch(gpu, make_run(), OnGPU(), ahead=2)):
        assert step(gpu, batch) == value
        scratch = gpu.allocate()  # the step's own memory, from the compute stream's pool
        scratch.write("scratch")


# --- loaders that reuse their memory --------------------------------------------------------------


def refilled(gpu, count, wrap=lambda tensor: tensor):
    """Yield batches that are all written into one buffer on the GPU."""
    buffer = gpu.allocate()
    buffer.to = lambda device: buffer  # as a tensor of torch that is on the device already
    for value in range(count):
        buffer.write(value)
        yield wrap(buffer)


@pytest.mark.parametrize(
    "wrap", [lambda t: t, lambda t: [t, 1], lambda t: {"x": (t,)}, lambda t: Holder(t)]
)
@pytest.mark.parametrize("ahead", [0, 3])
def test_a_loader_may_refill_a_buffer_on_the_gpu(gpu, ahead, wrap):
    def value(batch):
        while not hasattr(batch, "read"):
            if isinstance(batch, Holder):
                batch = batch.tensor
            else:
                batch = batch["x"] if isinstance(batch, dict) else batch[0]
        return step(gpu, batch)

    batches = prefetch(gpu, make_run(), refilled(gpu, 5, wrap), ahead=ahead)
    assert [value(batch) for batch in batches] == [0, 1, 2, 3, 4]


class Holder:
    """An object whose ``to`` returns itself, as in several libraries."""

    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, device):
        return self


def test_a_new_object_around_the_same_tensor_stays_too():
    class Around(Holder):
        def to(self, device):
            return Around(self.tensor.to(device))

    old = Around(torch.ones(2))
    assert stays(old, old.to("cpu"))
    assert stays({"a": [old]}, {"a": [old.to("cpu")]})
    assert not stays(old, Around(torch.ones(2)))
    assert not stays((torch.ones(2), "text", 3), (torch.ones(2), "text", 3))


def test_nothing_is_read_ahead_after_a_batch_that_stays(gpu):
    read = []

    def some():
        for value in range(6):
            read.append(value)
            if value == 2:
                yield from refilled(gpu, 1, lambda tensor: Holder(tensor))
            else:
                yield CPUBatch(gpu, value)

    batches = prefetch(gpu, make_run(), some(), ahead=4)
    assert step(gpu, next(batches)) == 0
    assert read == [0, 1, 2]
    next(batches), next(batches)
    assert read == [0, 1, 2]
    assert step(gpu, next(batches)) == 3
    assert read == [0, 1, 2, 3]


@pytest.fixture
def late(monkeypatch):
    """Copy as the GPU copies from pinned memory: read it when the batch is used."""
    monkeypatch.setattr("geartrain_cuda.batches.move", lambda batch, device: lambda: batch.tolist())


@pytest.mark.parametrize("pins_all", [True, False])
@pytest.mark.parametrize("ahead", [0, 3])
def test_a_loader_may_refill_pinned_memory(gpu, pins, late, ahead, pins_all):
    def refills():
        buffer = torch.zeros(1).pin_memory()
        for value in range(5):
            yield buffer.fill_(value)

    batches = Prefetcher(DEVICE, ahead, pins_all).batches(make_run(), refills(), "train")
    found, before = [], None
    for batch in batches:  # the GPU is one step behind
        found += [] if before is None else before()
        before = batch
    assert [*found, *before()] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("ahead", [0, 1])
def test_batches_that_torchs_loader_has_pinned_are_not_copied_again(gpu, pins, monkeypatch, ahead):
    given = []
    monkeypatch.setattr("geartrain_cuda.batches.move", lambda batch, device: given.append(batch))
    own = [torch.arange(3).pin_memory(), torch.arange(3)]
    trusted = DataLoader(own, batch_size=None, pin_memory=True)
    # As on a machine where memory can be pinned.
    monkeypatch.setattr(DataLoader, "__iter__", lambda self: iter(own))
    list(Prefetcher(DEVICE, ahead, True).batches(make_run(), trusted, "train"))
    assert given[0] is own[0]
    unpinned = DataLoader(own, batch_size=None)
    list(Prefetcher(DEVICE, ahead, True).batches(make_run(), unpinned, "train"))
    assert given[2] is not own[0]
    assert all(tensor.is_pinned() for tensor in given)


# --- the end --------------------------------------------------------------------------------------


def test_an_error_of_the_loader_is_raised_after_the_earlier_batches(gpu):
    def failing():
        yield from loader(gpu, 3)
        raise KeyError("row 3")

    seen = []
    with pytest.raises(KeyError, match="row 3"):  # noqa: PT012
        for batch in prefetch(gpu, make_run(), failing(), ahead=5):
            seen.append(step(gpu, batch))
    assert seen == [0, 1, 2]


def test_an_error_of_a_transfer_hook_is_raised_after_the_earlier_batches(gpu):
    class Net(gt.Module):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            if batch.value == 2:
                raise StopIteration  # not the end of the loader
            return batch

    seen = []
    with pytest.raises((StopIteration, RuntimeError)):  # noqa: PT012
        batches = prefetch(gpu, make_run(Net()), loader(gpu, 5), ahead=3)
        for _ in range(3):
            seen.append(step(gpu, next(batches)))
    assert seen == [0, 1]


def test_an_interrupt_is_raised_immediately(gpu):
    def interrupted():
        yield CPUBatch(gpu, 0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(prefetch(gpu, make_run(), interrupted()))


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_close_does_not_wait_and_frees_all_memory(gpu, taken):
    source = loader(gpu, 10)
    batches = prefetch(gpu, make_run(), source, ahead=2)
    for batch in islice(batches, taken):
        step(gpu, batch)
        del batch
    batches.close()
    assert list(batches) == []
    gc.collect()
    assert sum(map(len, gpu.free.values())) == next(gpu.numbers)
    assert next(source) is not None  # the user's generator continues


# --- how far ahead --------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "ahead"), [(1, 3), (2, 1), (5, 3)])
def test_no_more_batches_are_read_than_the_loop_uses(gpu, limit, ahead):
    read = []
    source = loader(gpu, 1000, read)
    for start in (0, limit):  # the generator continues in the second epoch
        batches = prefetch(gpu, make_run(batches=[limit]), source, ahead=ahead)
        values = [step(gpu, batch) for batch in islice(batches, limit)]
        assert values == list(range(start, start + limit))
        assert read == list(range(start + limit))
        batches.close()


def test_only_the_given_number_of_batches_is_read_ahead(gpu):
    read = []
    batches = prefetch(gpu, make_run(), loader(gpu, 1000, read), ahead=3)
    assert read == []  # no batch is read before the first next()
    next(batches)
    assert len(read) == 4
    next(batches)
    assert len(read) == 5


SANITY = {"run_stage": "sanity_check"}


@pytest.mark.parametrize(
    ("stage", "options", "means"),
    [
        ("train", {}, None),
        ("train", {"batches": [7]}, 7),
        ("train", {"batches": [7], "max_steps": 3}, 3),
        ("train", {"max_steps": 3, "step": 1, "accumulate_grad_batches": 4}, 8),
        ("train", {"batches": [7], "max_steps": 100}, 7),
        ("validate", {}, None),
        ("validate", {"batches": [7], "max_steps": 3}, 7),
        ("validate", {"batches": [7, 5], "index": 1}, 5),
        ("validate", {"batches": [0]}, 1),
        ("validate", {**SANITY, "batches": [7]}, 2),
        ("validate", SANITY, 2),
        ("validate", {**SANITY, "batches": [1]}, 1),
        ("validate", {**SANITY, "batches": [7], "num_sanity_val_steps": -1}, 7),
    ],
)
def test_most_is_the_number_of_batches_that_the_loop_uses(stage, options, means):
    assert most(make_run(stage=stage, **options), stage, options.get("index", 0)) == means


# --- the module's transfer hooks ------------------------------------------------------------------


def test_the_hook_before_transfer_runs_ahead_and_the_hook_after_it_when_due(gpu):
    log = []

    class Net(gt.Module):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            assert gpu.current is gpu.compute
            log.append(("before", batch.value, dataloader_idx))
            return batch

        def on_after_batch_transfer(self, batch, dataloader_idx):
            assert gpu.current is gpu.compute
            log.append(("after", batch.read(), dataloader_idx))
            return [batch]

    run = make_run(Net(), [9, 9, 9], stage="validate", index=2)
    batches = prefetch(gpu, run, loader(gpu, 3), stage="validate")
    run.dataloader_idx = 0  # an evaluation may change it; these batches are of the third loader
    for (batch,) in batches:
        log.append(("step", step(gpu, batch)))
    assert log == [
        *[("before", 0, 2), ("before", 1, 2), ("after", 0, 2), ("step", 0)],
        *[("before", 2, 2), ("after", 1, 2), ("step", 1)],
        *[("after", 2, 2), ("step", 2)],
    ]


def test_a_module_that_overrides_the_transfer_gets_no_batches_ahead(gpu):
    log = []

    class Net(gt.Module):
        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            assert gpu.current is gpu.compute
            log.append(batch.value)
            return batch.value

    batches = prefetch(gpu, make_run(Net()), loader(gpu, 4), ahead=3)
    assert next(batches) == 0
    assert log == [0]


# --- pinning --------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "x y")


@dataclass
class Sample:
    x: object
    name: str


class Owner:
    """An object of a library, whose tensors only the object itself can pin."""

    def __init__(self, tensor):
        self.tensor = tensor

    def pin_memory(self):
        return Owner(self.tensor.pin_memory())


@pytest.fixture
def pins(monkeypatch):
    """Fake pinned memory on a machine without CUDA; return the set of pinned addresses."""
    addresses, kept = set(), []

    def pin_memory(self):
        same = self.clone()
        addresses.add(same.data_ptr())
        kept.append(same)  # so that its address is not reused
        return same

    empty_like = torch.empty_like

    def empty(tensor, pin_memory=False):
        return empty_like(tensor).pin_memory() if pin_memory else empty_like(tensor)

    monkeypatch.setattr(torch, "empty_like", empty)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: self.data_ptr() in addresses)
    return addresses


def test_everything_is_pinned_in_any_nesting(pins):
    tensor = torch.arange(3)
    data = {"list": [tensor, (tensor, 5)], "pair": Pair(tensor, "text")}
    data |= {"sample": Sample(tensor, "a"), "owner": Owner(tensor)}
    found = pinned(OrderedDict(data))
    tensors = [found["list"][0], found["list"][1][0], found["pair"].x]
    tensors += [found["sample"].x, found["owner"].tensor]
    assert all(t.is_pinned() and t.equal(tensor) for t in tensors)
    assert not tensor.is_pinned()
    assert (found["list"][1][1], found["pair"].y, found["sample"].name) == (5, "text", "a")
    assert type(found) is OrderedDict
    assert type(found["pair"]) is Pair


def test_a_sparse_tensor_is_not_copied(pins):
    sparse = torch.eye(3).to_sparse()
    assert pinned(sparse) is sparse


class Broken(CPUBatch):
    """A batch whose ``pin_memory`` raises."""

    def pin_memory(self):
        raise RuntimeError(f"CUDA error: {self.error}")


def unpinnable(gpu, error):
    batch = Broken(gpu, 0)
    batch.error = error
    return batch


@pytest.mark.parametrize("words", ["out of memory", "OS call failed or operation not supported"])
def test_a_lack_of_pinned_memory_is_one_warning_and_batches_are_used_unpinned(gpu, words):
    run, prefetcher = make_run(), Prefetcher(DEVICE, 1, True)
    batch = unpinnable(gpu, f"{words}\nand more")
    message = rf"cannot be pinned.*: CUDA error: {words}\. Fix: allow more locked memory"
    with pytest.warns(UserWarning, match=message):
        assert [step(gpu, b) for b in prefetcher.batches(run, [batch, batch], "train")] == [0, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [step(gpu, b) for b in prefetcher.batches(run, [batch], "train")] == [0]


def test_another_error_of_pinning_is_raised(gpu):
    batch = unpinnable(gpu, "device-side assert triggered")
    with pytest.raises(RuntimeError, match="device-side assert"):
        next(Prefetcher(DEVICE, 1, True).batches(make_run(), [batch], "train"))


def test_an_object_without_pinning_does_not_change(pins):
    class Unpinnable(Owner):
        def pin_memory(self):
            raise NotImplementedError("Could not run 'aten::_pin_memory'")

    data = [Unpinnable(torch.ones(2)), torch.arange(3)]
    found = pinned(data)
    assert found[0] is data[0]
    assert found[1].is_pinned()
