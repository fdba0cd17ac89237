"""``explain --memory``: predict a rank's memory, and the bytes that it sends in a step.

The run's own code makes the module, wraps it and takes a few steps, in this process, with tensors
that have a shape and no data (torch's FakeTensorMode), and in a process group that sends nothing.
A dispatch mode sees each operation, and adds up the storages that are alive.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from geartrain import Run, Trainer, UsageError, World, __version__, hookimpl
from geartrain.plugin_api import (
    Hooks,
    LoadedPlugin,
    MappedBatches,
    PluginInfo,
    close_batches,
    length,
    map_tensors,
)
from geartrain_cli.arguments import Request
from geartrain_cli.panel import user_lines

#: Strategies that can be counted -> True if they make tensors of the model's size in wrap_model,
#: which must be fake. That of fsdp reads values of small tensors, which must be real.
_STRATEGIES = {"single": True, "ddp": True, "fsdp": False, "ddp_sharded": False}
#: Optimizer steps. The first makes the optimizer's states; the peak is that of the others.
_STEPS = 3
#: torch's errors about a tensor's data.
_NO_VALUE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank."""

    #: In the training step, when most are alive.
    parameters: int
    gradients: int
    optimizer_states: int
    activations: int
    #: The most while the model is made and wrapped.
    set_up: int
    #: Sent in one optimizer step; the mean of all ranks.
    sent: int
    #: Labels of selected plugins that were left out.
    left_out: tuple[str, ...]

    @property
    def peak(self) -> int:
        """The most of the whole training."""
        return max(self.set_up, self.training)

    @property
    def training(self) -> int:
        """The most in a training step."""
        return self.parameters + self.gradients + self.optimizer_states + self.activations

    def as_dict(self) -> dict[str, Any]:
        """Return the entry ``memory`` of ``explain --json``, in bytes."""
        return {
            "method": "predicted: counted from fake tensors, not measured",
            "peak": self.peak,
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer_states": self.optimizer_states,
            "activations": self.activations,
            "set_up": self.set_up,
            "sent_per_step": self.sent,
            "left_out": list(self.left_out),
        }


def predict(request: Request) -> Memory:
    """Predict the memory of a rank in the ``fit`` of this command line.

    Args:
        request: its trainer has a complete plan, which may assume hardware.

    Raises:
        UsageError: the strategy cannot be counted, or the module reads the value of a tensor.
    """
    trainer, strategy = request.trainer, request.trainer.plan.strategy
    if strategy.name not in _STRATEGIES:
        names = ", ".join(_STRATEGIES)
        raise UsageError(
            f"{strategy.label}: explain --memory cannot count this strategy. "
            f"Fix: --strategy with one of {names}, or leave --memory out"
        )
    counting = _Counting(strategy.name, gloo=trainer.plan.accelerator.name != "cuda")
    kept = [part for part in _plugins(trainer) if _computes(trainer, part)]
    left_out = [part.info.label for part in _plugins(trainer) if part not in kept]
    copy = _trainer(trainer, counting, kept)
    try:
        with counting.fake_modules(request.target[0]):
            module, data = request.make_model()
        copy.fit(module, datamodule=data)
    except _Counted:
        return counting.result(tuple(left_out))
    except _NO_VALUE as error:
        lines = user_lines(error)
        place = f" at {lines[0]}" if lines else ""
        raise UsageError(
            f"explain --memory computes no values, and {type(error).__name__} was raised{place}. "
            "Fix: train without the value of a tensor (.item(), .tolist(), if), "
            "and without shapes that depend on values; or leave --memory out"
        ) from error
    finally:
        if counting.has_group and dist.is_initialized():  # the run failed before its teardown
            dist.destroy_process_group()
    raise AssertionError("the run ended before its steps were counted")


def _plugins(trainer: Trainer) -> list[LoadedPlugin]:
    parts = (part for part in trainer.setup.parts if part.info.kind == "plugin")
    return [part for part in parts if not getattr(part.plugin, "shows_progress", False)]


def _computes(trainer: Trainer, part: LoadedPlugin) -> bool:
    """True if a plugin wraps or owns a single hook, so that it may take part in the step."""
    hooks = trainer.hooks
    return any(
        part.info in hooks.implementers(name) for name in hooks.names if hooks.is_single(name)
    )


def _trainer(trainer: Trainer, counting: _Counting, kept: list[LoadedPlugin]) -> Trainer:
    """Return a trainer for a few steps on the CPU, with the parts of the step alone."""
    setup = trainer.setup
    cpu, _ = setup.registry.select_accelerator("cpu", {}, {})
    chosen = [part for part in setup.parts if part.info.kind in ("precision", "strategy")]
    info = PluginInfo("memory", "plugin", "geartrain-cli", __version__, "explain --memory")
    steps = trainer.plan.options.max_steps
    options = replace(
        trainer.plan.options,
        max_steps=-1 if steps == -1 else max(steps, _STEPS),
        limit_train_batches=None,
        limit_val_batches=0,
        overfit_batches=0.0,
        num_sanity_val_steps=0,
        val_check_interval=1.0,
        check_val_every_n_epoch=1,
        log_every_n_steps=_STEPS + 1,  # a flush would read values
        enable_progress_bar=False,
        fast_dev_run=0,
    )
    plan = replace(
        trainer.plan,
        accelerator=cpu.info,
        options=options,
        output=None,
        assumed=False,
        plugins=(*(part.info for part in kept), info),
    )
    made = object.__new__(type(trainer))
    setup = setup.with_plugins(plan, (cpu, *chosen, *kept, LoadedPlugin(info, counting)))
    hooks = Hooks(setup.parts)
    vars(made).update(vars(trainer), datamodule=None, _run=None, _setup=setup, hooks=hooks)
    return made


class _Counted(Exception):
    """All steps were counted; :func:`predict` catches it."""


class _Counter(TorchDispatchMode):
    """Adds up the bytes of the storages that are alive, and of collectives.

    Args:
        gloo: True if the ranks will use gloo.
    """

    def __init__(self, gloo: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gloo = gloo
        #: Address of a storage -> its bytes, and the reference that reports its end.
        self.alive: dict[int, tuple[int, Any]] = {}
        self.total = self.peak = 0
        self.sent = 0.0
        #: Called at each new peak.
        self.on_peak: Callable[[], None] = _do_nothing

    def __enter__(self) -> _Counter:
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self.add(storage)
            return result

        self._resizing = _replaced(torch.UntypedStorage, "resize_", resize_)
        self._resizing.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._resizing.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it calls operations on its local tensor
        result = func(*args, **(kwargs or {}))
        if func in collective_ops and func not in sync_ops:
            self._communicate(func, args, result)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.track(tensor)
        return result

    def _communicate(self, func: Any, args: Any, result: Any) -> None:
        """Add the bytes that a rank sends in a ring: the mean of all ranks.

        gloo gathers into a buffer of its own. It has no reduce-scatter: torch all-reduces a copy.
        """
        name, size = func.__name__, CollectiveOp.get_process_group(func, args).size()
        whole = max(
            sum(each.nbytes for each in tree_leaves(part) if isinstance(each, torch.Tensor))
            for part in (*args, result)
        )
        scatters = "scatter" in name
        if self._gloo and (scatters or "gather" in name):
            self._grow(whole)
            self.total -= whole
        all_reduces = "reduce" in name and (self._gloo or not scatters)
        self.sent += (2 if all_reduces else 1) * whole * (size - 1) / size

    def track(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage, if it is not counted yet."""
        for local in _locals(tensor):
            self.add(local.untyped_storage())

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage, or its new size."""
        key, size = storage._cdata, storage.nbytes()
        before, reference = self.alive.get(key, (0, None))
        if reference is None:
            reference = weakref.ref(storage, lambda _: self._remove(key))
        self.alive[key] = size, reference
        self._grow(size - before)

    def _grow(self, size: int) -> None:
        self.total += size
        if self.total > self.peak:
            self.peak = self.total
            self.on_peak()

    def _remove(self, key: int) -> None:
        size, _ = self.alive.pop(key)
        self.total -= size


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@torch.no_grad()
def _apply(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Do what ``nn.Module._apply`` does; that one cannot replace fake parameters."""
    made: dict[Any, Any] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter not in made:
                value = function(parameter)
                is_same = value is parameter
                made[parameter] = value if is_same else nn.Parameter(value, parameter.requires_grad)
            part._parameters[name] = made.get(parameter)
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else function(buffer)
    return module


def _do_nothing(*_: object, **__: object) -> None:
    pass


def _locals(tensor: Any) -> Iterator[torch.Tensor]:
    """Yield a tensor with a storage: the tensor, or this rank's part of it."""
    if isinstance(tensor, torch.Tensor):
        yield tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _addresses(tensors: Iterable[Any]) -> set[int]:
    return {local.untyped_storage()._cdata for each in tensors for local in _locals(each)}


class _Reducer:
    """DDP's reducer, which would read tensors to put its buckets in order after the first step."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


class _Repeated:
    """A loader's first batch, for all steps.

    Args:
        loader: this rank's.
        least: the batches of all steps. The length of a longer loader is kept, for schedulers.
    """

    def __init__(self, loader: Any, least: int) -> None:
        self._loader, self._count = loader, max(least, length(loader) or 0)
        self.batch_size = getattr(loader, "batch_size", None)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        first = next(batches, None)
        close_batches(batches, self._loader)
        return iter(()) if first is None else repeat(first, self._count)


class _Counting:
    """The plugin that keeps a run in this process, and counts it.

    Args:
        strategy: its name.
        gloo: True if the ranks will use gloo.
    """

    replaces = frozenset(
        {
            *("launch", "setup_device", "setup_process_group"),
            *("log_sync", "all_gather", "broadcast", "barrier"),
        }
    )

    def __init__(self, strategy: str, gloo: bool) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.counter = _Counter(gloo)
        self.has_group = False
        self._wraps_with_fakes = _STRATEGIES[strategy]
        self._in_groups = strategy != "single"
        self._parameters: list[torch.Tensor] = []
        self._buckets: set[int] = set()
        self._steps = 0
        self._set_up = 0
        self._parts = (0, 0, 0, 0)
        self._sent = 0.0

    def result(self, left_out: tuple[str, ...]) -> Memory:
        """Return the figures of the steps that were counted."""
        return Memory(*self._parts, self._set_up, round(self._sent), left_out)

    @contextmanager
    def fake_modules(self, cls: Any) -> Iterator[None]:
        """Let a class make its modules with fake tensors. Its arguments, and data, are real."""
        init = cls.__init__

        @wraps(init)
        def fake_init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            with self.mode, self.counter:
                init(module, *args, **kwargs)

        with _replaced(cls, "__init__", fake_init), warnings.catch_warnings():
            # Of a deepcopy, which torch handles.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield

    # --- the process and its group ----------------------------------------------------------------

    @hookimpl
    def launch(self, run: Run, worker: Callable[[int], Any]) -> Any:
        for part in run.hooks.parts:
            if part.info.kind == "strategy" and hasattr(part.plugin, "ddp_options"):
                part.plugin.ddp_options["init_sync"] = False  # it reads the weights
        return worker(0)

    @hookimpl
    def setup_device(self) -> torch.device:
        return torch.device("cpu")

    @hookimpl
    def setup_process_group(self, run: Run) -> World:
        if not self._in_groups:
            return World()
        size = run.plan.processes or 1
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
        self.has_group = True
        return World(0, size, 0, run.plan.layout.processes_per_node or 1, 0)

    @hookimpl
    def log_sync(self, run: Run, values: torch.Tensor) -> torch.Tensor:
        return values.expand(run.world.size, -1)

    @hookimpl
    def all_gather(self, run: Run, tensor: torch.Tensor) -> torch.Tensor:
        if run.world.size == 1:
            return tensor[None]
        table = [torch.empty_like(tensor) for _ in range(run.world.size)]
        dist.all_gather(table, tensor.detach())
        return torch.stack(table)

    @hookimpl
    def broadcast(self, obj: Any) -> Any:
        return obj

    @hookimpl
    def barrier(self) -> None:
        """Return at once: there is one process."""

    # --- data -------------------------------------------------------------------------------------

    @hookimpl(wrapper=True)
    def shard_dataloader(self, run: Run, stage: str) -> Generator[None, Any, Any]:
        loader = yield
        if stage != "train":
            return loader
        return _Repeated(loader, _STEPS * run.plan.options.accumulate_grad_batches)

    @hookimpl(wrapper=True)
    def device_batches(self, loader: Iterable[Any]) -> Generator[None, Any, Any]:
        return MappedBatches((yield), loader, lambda batch: map_tensors(batch, self._fake))

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, FakeTensor):
            with self.mode:
                tensor = torch.empty_like(tensor)
        self.counter.track(tensor)
        return tensor

    # --- the model and its steps ------------------------------------------------------------------

    @hookimpl(wrapper=True)
    def wrap_model(self, run: Run, model: nn.Module) -> Generator[None, Any, Any]:
        # These read values.
        run.logs.log = _do_nothing  # type: ignore[method-assign]
        run.coordinator.total_weight = lambda run, weight: weight  # type: ignore[method-assign]
        run.coordinator.check_agreement = _do_nothing  # type: ignore[method-assign]
        _apply(model, self._faked)
        gc.collect()  # the address of a storage may otherwise be that of a new one
        for tensor in (*model.parameters(), *model.buffers()):
            self.counter.track(tensor)
        before = set(self.counter.alive)
        with self._fakes(), self.counter, _replaced(nn.Module, "_apply", _apply):
            wrapped: nn.Module = yield
        if isinstance(wrapped, DistributedDataParallel):
            self._buckets = self.counter.alive.keys() - before
            wrapped.reducer = _Reducer(wrapped.reducer)  # type: ignore[assignment]
        self._parameters = [*wrapped.parameters(), *wrapped.buffers()]
        return wrapped

    def _faked(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of this mode. One that setup() made is real; a deepcopy has its own."""
        if getattr(tensor, "fake_mode", None) is self.mode:
            return tensor
        with self.mode:
            fake: torch.Tensor = tensor.detach()
            return fake

    def _fakes(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any]
        context = self.mode if self._wraps_with_fakes else nullcontext()
        return context

    @hookimpl(wrapper=True)
    def step(self, run: Run) -> Generator[None, Any, None]:
        counter = self.counter
        if self._steps == 0:
            self._set_up = counter.peak
        if self._steps == 1:
            counter.peak, counter.on_peak = 0, lambda: self._split(run)
        counter.sent = 0.0
        gc.collect()  # graphs of fake tensors have cycles, and those of a run do not
        with self.mode, counter:
            yield
        self._steps += 1
        if self._steps == _STEPS:
            self._sent = counter.sent
            raise _Counted

    @hookimpl(optionalhook=True)
    def reduce_bucket(self, run: Run, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Reduce a bucket as DDP does. Its own all-reduce would wait for a result of the group."""
        mean: torch.Tensor = bucket.buffer().div_(run.world.size)
        dist.all_reduce(mean)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(mean)
        return future

    @hookimpl(wrapper=True)
    def reduce_gradients(self) -> Generator[None, Any, None]:
        with unset_fake_temporarily():  # it may compare small tensors, which must be real
            yield

    def _split(self, run: Run) -> None:
        """Attribute the bytes that are alive at a peak."""
        alive = {key: size for key, (size, _) in self.counter.alive.items()}
        stepped = [
            p for each in run.optimizers for group in each.param_groups for p in group["params"]
        ]
        gradients = [parameter.grad for parameter in (*self._parameters, *stepped)]
        states = [
            v for each in run.optimizers for state in each.state.values() for v in state.values()
        ]

        def take(keys: set[int]) -> int:
            return sum(alive.pop(key, 0) for key in keys)

        parameters = take(_addresses([*self._parameters, *stepped]))
        reduced = take(_addresses(gradients) | self._buckets)
        kept = take(_addresses(states))
        activations = self.counter.total - parameters - reduced - kept
        self._parts = parameters, reduced, kept, activations
