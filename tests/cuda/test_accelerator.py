"""The accelerator in a trainer: options, plan, set-up, tear-down, and training with its batches."""

import contextlib
import functools
import inspect
import types
import warnings

import pynvml
import pytest
import torch
from several_ranks import results
from small_models import EvalNet, Net, assert_equal, fit, loader

import geartrain as gt
from geartrain import Layout, Plan, TrainingError, UsageError, hookimpl
from geartrain.data.stage import Stage
from geartrain.module.nested import map_tensors
from geartrain_cuda import CUDAAccelerator
from geartrain_cuda.batches import Prefetcher
from geartrain_cuda.settings import Settings

from .fake_pynvml import FakeGPU
from .fake_streams import GPU, Event

# --- options --------------------------------------------------------------------------------------


def test_every_option_is_documented_and_typed():
    documented = inspect.cleandoc(CUDAAccelerator.__doc__)
    for name, parameter in inspect.signature(CUDAAccelerator).parameters.items():
        assert f"\n    {name}: " in documented
        assert parameter.annotation is not parameter.empty


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accelerator_options": {"prefetch": -1}}, r"geartrain-cuda\[cuda\]: prefetch=-1 must be"),
        ({"accelerator_options": {"prefetch": 1.5}}, "prefetch=1.5"),
        ({"accelerator_options": {"prefetch": True}}, "prefetch=True"),
        ({"accelerator_options": {"matmul_precision": "low"}}, "matmul_precision"),
        ({"accelerator_options": {"prefetsch": 1}}, "Did you mean 'prefetch'"),
        (
            {"accelerator_options": {"cudnn_benchmark": True}, "deterministic": True},
            r"geartrain-cuda\[cuda\]: cudnn_benchmark=True .*Fix: leave one",
        ),
        (
            {"accelerator_options": {"cudnn_benchmark": True}, "deterministic": "warn"},
            r"geartrain-cuda\[cuda\]: cudnn_benchmark=True .*Fix: leave one",
        ),
        ({"accelerator_options": {"cudnn_benchmark": False}, "deterministic": True}, None),
        (
            {"strategy": "ddp", "strategy_options": {"process_group_backend": "ucc"}},
            r"geartrain-ddp\[ddp\]: process_group_backend='ucc' cannot be used on cuda",
        ),
    ],
)
def test_wrong_and_contradictory_options_are_refused(machine, options, message):
    machine(2)
    options = {"accelerator": "cuda", "strategy": "single", "devices": 1, **options}
    with pytest.raises(UsageError, match=message) if message else contextlib.nullcontext():
        gt.Trainer(**options).check(Net())


@pytest.fixture
def globals_():
    """Return a function that reads torch's settings; restore them after the test."""
    cudnn = torch.backends.cudnn

    def read():
        matmul = torch.get_float32_matmul_precision()
        return matmul, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32

    before, nodes = read(), precisions()
    yield read
    set_precisions(dict.fromkeys(nodes, "none"))
    torch.set_float32_matmul_precision(before[0])
    cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32 = before[1:]
    set_precisions(nodes)


NODES = ("", "cudnn", "cuda.matmul", "mkldnn.matmul", "cudnn.conv", "cudnn.rnn")
needs_tree = pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason="this torch has no fp32_precision"
)


def node(path):
    return functools.reduce(getattr, filter(None, path.split(".")), torch.backends)


def precisions():
    """Return the current precision of each node; an empty dictionary if torch has none."""
    if not hasattr(torch.backends, "fp32_precision"):
        return {}
    return {path: node(path).fp32_precision for path in NODES}


def set_precisions(values):
    for path, value in values.items():
        node(path).fp32_precision = value


WANTED = {
    "matmul_precision": "medium",
    "cudnn_benchmark": True,
    "cudnn_deterministic": True,
    "cudnn_allow_tf32": False,
}


def test_settings_of_none_are_not_changed(globals_):
    before = globals_()
    settings = Settings(**dict.fromkeys(WANTED))
    settings.apply()
    assert globals_() == before
    torch.backends.cudnn.benchmark = not before[1]
    settings.put_back()
    assert torch.backends.cudnn.benchmark is not before[1]


@needs_tree
@pytest.mark.parametrize("asked", [{"matmul_precision": "high"}, WANTED])
@pytest.mark.parametrize(
    "set_before", [{}, {"": "ieee"}, {"cuda.matmul": "ieee"}, {"mkldnn.matmul": "ieee"}]
)
def test_precisions_of_both_generations_are_restored(globals_, set_before, asked):
    """Afterwards, the top node changes the same nodes as before."""
    torch.backends.cudnn.allow_tf32 = True
    if "" in set_before and "cudnn_allow_tf32" in asked:
        set_before = {**set_before, "cudnn.conv": "tf32", "cudnn.rnn": "tf32"}
    set_precisions(set_before)
    before, settings = (globals_(), precisions()), Settings(**asked)

    def reached():
        kept = torch.backends.fp32_precision
        torch.backends.fp32_precision = "tf32"
        try:
            return precisions()
        finally:
            torch.backends.fp32_precision = kept

    reaches = reached()
    for _ in range(2):
        settings.apply()
        assert torch.get_float32_matmul_precision() == asked["matmul_precision"]
        assert precisions()["cuda.matmul"] == "tf32"
        settings.put_back()
        assert (globals_(), precisions()) == before
        assert reached() == reaches


def precisions_in_a_new_process(applied):
    if applied:
        settings = Settings(cudnn_allow_tf32=True, matmul_precision="highest")
        settings.apply()
        settings.put_back()
    torch.backends.fp32_precision = "ieee"
    return [node(path).fp32_precision for path in ("cudnn.conv", "cuda.matmul")]


@needs_tree
def test_a_setting_that_is_already_set_is_not_written(tmp_path):
    """cuDNN's default TF32, which nodes above override, cannot be written again."""
    both = [
        results(tmp_path, precisions_in_a_new_process, applied, ranks=1, place="alone")
        for applied in (True, False)
    ]
    assert both[0] == both[1]


@needs_tree
@pytest.mark.parametrize(
    ("set_before", "asked"),
    [
        ({"cuda.matmul": "tf32"}, {"matmul_precision": "high"}),
        ({"": "tf32"}, {"matmul_precision": "highest"}),
        ({"cudnn.conv": "ieee"}, {"cudnn_allow_tf32": False}),
    ],
)
def test_settings_that_contradict_torchs_newer_ones_are_refused_before_a_run(
    machine, globals_, set_before, asked
):
    machine(1)
    set_precisions(set_before)
    (name,) = asked
    words = rf"geartrain-cuda\[cuda\]: {name}=.* cannot be set, because this program .*"
    words += rf"fp32_precision.*Fix: leave out {name}, and set"
    with pytest.raises(UsageError, match=words):
        gt.Trainer(accelerator="cuda", strategy="single", accelerator_options=asked).check(Net())
    before = precisions()
    with pytest.raises(UsageError, match=words):
        Settings(**asked).apply()
    assert precisions() == before


# --- the plan -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["auto", "gpu", "cuda", "CUDA"])
def test_cuda_is_chosen_if_it_can_be_used(machine, name):
    machine(1)
    plan = gt.Trainer(accelerator=name).plan
    assert plan.accelerator.name == "cuda"
    assert plan.accelerator.distribution == "geartrain-cuda"
    assert plan.devices == (0,)
    assert 20 < CUDAAccelerator.priority < 40  # above mps and below tpu


def test_the_error_has_the_reason_if_cuda_cannot_be_used(machine, counts):
    machine(error=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    counts(0)
    message = r"geartrain-cuda\[cuda\] cannot be used here: NVML: Driver Not Loaded"
    with pytest.raises(UsageError, match=message):
        gt.Trainer(accelerator="cuda")
    plan = gt.Trainer(accelerator="auto", devices=1).plan
    assert plan.accelerator.name == "cpu"
    assert plan.passed_over["geartrain-cuda[cuda]"] == "unavailable: NVML: Driver Not Loaded"


def plan_of(layout, devices):
    namespace = types.SimpleNamespace
    return namespace(
        layout=layout,
        devices=devices,
        strategy=namespace(label="mine"),
        accelerator=namespace(label="geartrain-cuda[cuda]", name="cuda"),
        options=namespace(deterministic=False),
        precision=namespace(name="32-true"),
    )


@pytest.mark.parametrize(
    ("layout", "right"),
    [(Layout(2, 1), True), (Layout(1, 2), True), (Layout(None, 1), True), (Layout(2, 2), False)],
)
def test_more_processes_than_gpus_are_refused(layout, right):
    plan: Plan = plan_of(layout, (0, 1))
    if right:
        CUDAAccelerator().check_plan(plan)
        return
    with pytest.raises(UsageError, match=r"mine plans .*devices=\[0, 1\] are 2. Fix: --devices"):
        CUDAAccelerator().check_plan(plan)


@pytest.mark.parametrize(
    ("strategy", "processes"), [("ddp", 4), ("ddp_spawn", 4), ("ddp2", 1), ("dp", 1)]
)
def test_strategies_can_be_planned_for_assumed_gpus(strategy, processes):
    """Also if this machine's torch has no nccl."""
    trainer = gt.Trainer(accelerator="cuda", assume={"cuda": 4}, strategy=strategy)
    assert trainer.check(Net()).processes == processes
    assert trainer.plan.assumed


# --- set-up and tear-down -------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch):
    """Fake the parts of ``torch.cuda`` that set-up needs.

    ``cuda.calls`` has the calls in order; ``cuda.fails[index]`` is the error of a context on a GPU.
    """
    fake = types.SimpleNamespace(calls=[], fails={}, initialized=False, current=0)

    def zeros(size, device):
        fake.calls.append(("context", device.index))
        fake.initialized = True
        if device.index in fake.fails:
            raise fake.fails[device.index]

    def set_device(index):
        fake.calls.append(("set", index))
        fake.current = index

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: fake.current)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: fake.initialized)
    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: ("stream", device.index))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda device: fake.calls.append(("wait", device.index))
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: fake.calls.append(("empty", None)))
    return fake


def run_of(devices, each=1):
    return types.SimpleNamespace(plan=plan_of(Layout(len(devices) // each, each), devices))


def test_each_process_takes_its_own_gpus(cuda):
    devices = [CUDAAccelerator().setup_device(run_of((3, 1)), rank) for rank in (0, 1)]
    assert devices == [torch.device("cuda", 3), torch.device("cuda", 1)]
    assert cuda.calls == [("set", 3), ("context", 3), ("set", 1), ("context", 1)]
    device = CUDAAccelerator().setup_device(run_of((5, 2, 7, 4), each=2), 1)
    assert device == torch.device("cuda", 7)
    assert cuda.current == 7


MODELS = {0: ("NVIDIA H200", 9), 1: ("Tesla T4", 7), 2: ("Tesla V100", 7), 3: ("NVIDIA A100", 8)}


@pytest.mark.parametrize(
    ("precision", "devices", "rank", "hip", "named"),
    [
        ("bf16-mixed", (0, 1, 2, 3), 0, None, "cuda:1 (Tesla T4), cuda:2 (Tesla V100)"),
        ("bf16-true", (2,), 0, None, "cuda:2 (Tesla V100)"),
        ("bf16-mixed", (0, 1), 1, None, None),  # the node's first rank warns
        ("bf16-mixed", (0, 3), 0, None, None),
        ("bf16-mixed", (1,), 0, "6.4", None),
        ("16-mixed", (1,), 0, None, None),
    ],
)
def test_bfloat16_without_the_hardware_is_warned_of(
    cuda, monkeypatch, precision, devices, rank, hip, named
):
    def properties(index):
        return types.SimpleNamespace(name=MODELS[index][0], major=MODELS[index][1])

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    run = run_of(devices)
    run.plan.precision.name = precision
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        CUDAAccelerator().setup_device(run, rank)
    if named is None:
        assert caught == []
        return
    (warning,) = (str(w.message) for w in caught)
    assert f"geartrain-cuda[cuda]: precision {precision} is emulated" in warning
    assert f"without a gain in speed, on {named}: " in warning
    assert warning.endswith("Fix: --precision 16-mixed")


@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_batches_are_pinned_with_and_without_prefetch(monkeypatch, cuda, pin_memory, prefetch):
    pinned = []

    class Batch:
        def pin_memory(self):
            pinned.append(self)
            return self

        def to(self, device):
            assert device == torch.device("cuda", 1)
            return "moved"

    GPU(monkeypatch)
    accelerator, run = CUDAAccelerator(pin_memory=pin_memory, prefetch=prefetch), run_of((1,))
    accelerator.setup_device(run, 0)
    run.module, run.stages, run.step = Net(), {"train": Stage(batches=[None])}, 0
    run.plan.options.max_steps, run.stage = -1, "train"
    batches = [Batch(), Batch()]
    assert list(accelerator.device_batches(run, iter(batches), "train")) == ["moved", "moved"]
    assert pinned == batches * pin_memory


def test_tear_down_restores_settings_and_device(cuda, globals_):
    before, accelerator = globals_(), CUDAAccelerator(**WANTED)
    cuda.initialized, cuda.current = True, 5
    accelerator.setup_device(run_of((1,)), 0)
    assert globals_() == ("medium", True, True, False)
    cuda.calls.clear()
    accelerator.teardown_device()
    assert globals_() == before
    assert cuda.calls == [("wait", 1), ("empty", None), ("set", 5)]
    cuda.calls.clear()
    accelerator.teardown_device()
    assert cuda.calls == []


def test_no_context_is_created_on_the_first_gpu_if_cuda_was_not_in_use(cuda):
    accelerator = CUDAAccelerator()
    accelerator.setup_device(run_of((1,)), 0)
    accelerator.teardown_device()
    assert ("set", 0) not in cuda.calls


def test_tear_down_restores_settings_after_a_failed_set_up(cuda, machine, globals_):
    machine(2)
    before, accelerator = globals_(), CUDAAccelerator(**WANTED)
    cuda.fails[1] = RuntimeError("CUDA error: out of memory")
    with pytest.raises(TrainingError):
        accelerator.setup_device(run_of((1,)), 0)
    accelerator.teardown_device()
    assert globals_() == before
    assert ("wait", 1) not in cuda.calls


def test_settings_are_restored_although_the_gpu_has_failed(cuda, globals_, monkeypatch):
    before, accelerator = globals_(), CUDAAccelerator(**WANTED)
    accelerator.setup_device(run_of((0,)), 0)

    def failed(device):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "synchronize", failed)
    # If the last steps have failed, the run has failed.
    with pytest.raises(RuntimeError, match="device-side assert"):
        accelerator.teardown_device()
    assert globals_() == before


def test_a_gpu_that_accepts_no_context_is_named_with_its_processes(cuda, machine):
    mode = pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
    taken = FakeGPU("GPU-b", processes=[(1, 900 * 2**20)], mode=mode)
    machine(FakeGPU("GPU-a"), taken, names={1: "init"})
    cuda.fails[1] = RuntimeError(
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nmore lines"
    )
    with pytest.raises(TrainingError) as caught:
        CUDAAccelerator().setup_device(run_of((1,)), 0)
    for word in (
        "geartrain-cuda[cuda]: cuda:1, GPU 1 (NVIDIA H200) cannot be used",
        "pid 1 init, 900 MiB (exclusive mode)",
        "busy or unavailable. Fix: ",
    ):
        assert word in str(caught.value)
    assert "more lines" not in str(caught.value)
    cuda.fails[3] = RuntimeError("CUDA error: invalid device ordinal")
    with pytest.raises(TrainingError, match="there is no GPU 3; 2 are visible"):
        CUDAAccelerator().setup_device(run_of((3,)), 0)
    with pytest.raises(TrainingError, match="local rank 2 has no GPU"):
        CUDAAccelerator().setup_device(run_of((0, 1)), 2)


# --- a whole training with its batches ------------------------------------------------------------


class OnCPU(CUDAAccelerator):
    """The accelerator on the CPU, to test its batches in the real loop; ``copies`` copies them."""

    unavailable = staticmethod(lambda: None)
    device_count = staticmethod(lambda: 1)

    @hookimpl
    def setup_device(self, run, local_rank):
        self._prefetcher = Prefetcher(torch.device("cpu"), self.prefetch, False)
        return torch.device("cpu")


@pytest.fixture
def copies(monkeypatch):
    GPU(monkeypatch)
    monkeypatch.setattr(
        "geartrain_cuda.batches.move", lambda batch, device: map_tensors(batch, torch.clone)
    )


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 3},
        {"limit_train_batches": 5, "limit_val_batches": 1},
        {"max_steps": 7, "max_epochs": -1},
        {"val_check_interval": 0.5, "num_sanity_val_steps": -1},
    ],
)
def test_training_is_as_on_the_cpu(copies, options, prefetch):
    nets = EvalNet(), EvalNet()
    nets[1].load_state_dict(nets[0].state_dict())

    def train(net, accelerator):
        more = {"accelerator": accelerator, "devices": 1, "max_epochs": 2, **options}
        return fit(net, loader(50), [loader(50, 8), loader(50, 16)], **more)

    on_cpu, ours = train(nets[0], "cpu"), train(nets[1], OnCPU(prefetch=prefetch))
    assert_equal(*nets)
    assert nets[0].seen == nets[1].seen
    assert ours.callback_metrics == on_cpu.callback_metrics
    assert ours.global_step == on_cpu.global_step


@pytest.mark.parametrize(
    ("options", "read", "prefetch"),
    [
        ({"limit_train_batches": 4, "max_epochs": 2}, 8, 0),
        ({"limit_train_batches": 4, "max_epochs": 2}, 8, 3),
        ({"max_steps": 5, "accumulate_grad_batches": 2}, 10, 3),
    ],
)
def test_an_endless_generator_is_read_only_as_far_as_needed(copies, options, read, prefetch):
    given = []

    def endless():
        while True:
            given.append(len(given))
            yield torch.ones(2, 3), torch.ones(2, 1)

    one = fit(Net(), endless(), accelerator=OnCPU(prefetch=prefetch), devices=1, **options)
    assert len(given) == read == one.global_step * options.get("accumulate_grad_batches", 1)
