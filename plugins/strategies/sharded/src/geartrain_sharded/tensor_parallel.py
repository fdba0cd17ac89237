"""The strategy tensor_parallel: each rank computes a part of a layer.

Megatron-LM: Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053
"""

from __future__ import annotations

import ctypes
import random
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication, register_sharding
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from geartrain import (
    Layout,
    Module,
    Plan,
    PlanRequest,
    Run,
    TrainingError,
    UsageError,
    hookimpl,
    seed_everything,
)
from geartrain.parallel import CollectiveOrder, average_gradients, refuse_sparse
from geartrain.plugin_api import map_tensors, nearest
from geartrain_sharded.dtensor_strategy import DTensorStrategy, error_of_parts
from geartrain_sharded.materialize import Materializer
from geartrain_sharded.plain import PlainModules
from geartrain_sharded.tensors import return_freed_tensors

#: Class -> for colwise and for rowwise, the dimension in which each parameter is split. They are
#: those of torch's ColwiseParallel and RowwiseParallel.
_SPLITS: dict[type[nn.Module], dict[str, dict[str, int]]] = {
    nn.Linear: {"colwise": {"weight": 0, "bias": 0}, "rowwise": {"weight": 1}},
    nn.Embedding: {"colwise": {"weight": 1}, "rowwise": {"weight": 0}},
}
_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "64-true")


class TensorParallelStrategy(DTensorStrategy):
    """Strategy ``tensor_parallel``: ranks have parts of the named layers, and see equal batches.

    All parameters are DTensors: the named ones are split, the others are whole on each rank. torch
    computes the module's own code with them as one process would, and communicates where it must.
    So the names decide time and memory, and not the result.

    Checkpoints are those of one process: rank 0 gathers them, and any strategy reads them. After a
    run, rank 0's module has the whole weights, on the CPU.

    Args:
        colwise: names of Linear or Embedding layers whose outputs are split, such as
            ``["qkv", "fc"]``: a submodule's name, the end of one, or a pattern with ``*``.
        rowwise: those whose inputs are split, such as the layer after a colwise one.
        size: consecutive ranks that have one model together. Other groups of so many ranks see
            other batches, and the gradients are averaged over the groups. Default: all ranks.
        process_group_backend: as for ddp.
        timeout: as for ddp.

    Raises:
        UsageError: an option has a value that cannot be used.
    """

    draws = None

    def __init__(
        self,
        colwise: Sequence[str] | str = (),
        rowwise: Sequence[str] | str = (),
        size: int | None = None,
        process_group_backend: str | None = None,
        timeout: float | timedelta = 1800.0,
    ) -> None:
        super().__init__(process_group_backend, timeout)
        if size is not None and size < 1:
            raise UsageError(f"size={size!r} must be above 0.")
        self.names = {
            "colwise": [colwise] if isinstance(colwise, str) else list(colwise),
            "rowwise": [rowwise] if isinstance(rowwise, str) else list(rowwise),
        }
        self.size = size
        #: Read by the conformance kit.
        self.capabilities = {"sharded_loader": False}
        self._mesh: DeviceMesh | None = None
        self._plain: PlainModules | None = None
        self._handles: list[RemovableHandle] = []
        self._agreement: CollectiveOrder | None = None

    # --- hooks ------------------------------------------------------------------------------------

    @hookimpl
    def plan_processes(self, request: PlanRequest) -> Layout:
        devices = len(request.devices)
        return Layout(devices, model_parallel_size=self.size or devices * request.num_nodes)

    @hookimpl  # hooks are called by argument name, so the override may add one
    def check_plan(self, plan: Plan, module: Module | type[Module]) -> None:  # type: ignore[override]
        super().check_plan(plan)
        label, processes = plan.strategy.label, plan.processes or 1
        if self.size is not None and processes % self.size:
            message = f"{label}: {processes} ranks are no multiple of size={self.size}"
            raise UsageError(f"{message}. Fix: use a size that divides them")
        if plan.precision.name not in _PRECISIONS:
            message = f"{label}: precision {plan.precision.name} is not supported"
            raise UsageError(f"{message}. Fix: --precision bf16-mixed")
        if not any(self.names.values()):
            message = f"{label}: no layer is named, so each rank would have the whole model"
            raise UsageError(f"{message}. Fix: --strategy.colwise NAME --strategy.rowwise NAME")
        compiled = [part.label for part in plan.plugins if part.name == "compile"]
        if isinstance(module, Module):
            self._splits(module, label)
            parts = module.named_modules()
            compiled += [name or "the module" for name, part in parts if _is_compiled(part)]
        if compiled:
            message = f"{label}: {compiled[0]}: torch cannot compile a step that mixes DTensors"
            raise UsageError(f"{message} and tensors. Fix: leave it out, or --strategy fsdp")

    def _splits(self, module: nn.Module, label: str) -> dict[nn.Parameter, Shard]:
        """Return the placements of the split parameters.

        Raises:
            UsageError: a name is that of no layer, or of one that cannot be split; or two names
                split one parameter differently.
        """
        found: dict[nn.Parameter, Shard] = {}
        layers = dict(module.named_modules())
        for way, patterns in self.names.items():
            for pattern in patterns:
                named = [each for each in layers if _is_named(each, pattern)]
                if not named:
                    known = sorted({name.rpartition(".")[2] for name in layers if name})
                    message = f"{label}: {way}: {type(module).__name__} has no part {pattern!r}"
                    raise UsageError(f"{message}. {nearest(pattern, known)}")
                for name in named:
                    for parameter, shard in _split(layers[name], way, f"{label}: {name}"):
                        if found.setdefault(parameter, shard) != shard:
                            message = f"{label}: {name} ({way}) has a weight that another name"
                            message += f" splits in dimension {found[parameter].dim}"
                            raise UsageError(f"{message}. Fix: name one of the two")
        return found

    def notes(self, plan: Plan) -> dict[str, str]:
        """Return the note of ``explain`` on the groups of ranks."""
        if plan.processes is None or plan.processes == 1:
            return {}
        size = plan.layout.model_parallel_size
        return {"model": f"{size} ranks have one model together, and see the same batches"}

    @hookimpl
    def wrap_model(self, run: Run, model: nn.Module) -> nn.Module:
        refuse_sparse(run)
        shape = (run.world.data_size, run.world.size // run.world.data_size)
        self._mesh = _mesh(run, shape)
        self._plain = PlainModules(model)
        if shape[1] > 1:
            action = "let the steps of ranks that have one model together do the same"
            self._agreement = CollectiveOrder(run, action, f"model {run.world.data_rank}")
        splits = self._splits(run.module, run.plan.strategy.label)
        if run.device.type == "cpu":
            return_freed_tensors()
        materializer, made = Materializer(run), dict[nn.Parameter, nn.Parameter]()
        # Before a submodule on the meta device is filled, which makes new parameters.
        parts = [(part, list(part._parameters.items())) for part in model.modules()]
        for part, slots in reversed(parts):  # one after the other: the whole model may not fit
            materializer.fill(part)
            for name, before in slots:
                if before is None:
                    continue
                if before not in made:
                    placement = splits.get(before, Replicate())
                    made[before] = self._distributed(part._parameters[name], placement)
                part._parameters[name] = made[before]
            if inputs := _whole if _is_metric(part) else _replicated if part._buffers else None:
                hook = partial(_with_inputs, inputs)
                self._handles.append(part.register_forward_pre_hook(hook, with_kwargs=True))
        for name, part in run.module.named_modules():
            ways = {way for way, names in self.names.items() for n in names if _is_named(name, n)}
            if ways:  # gloo would end the process if a rank ran another layer
                hook = partial(self._expect, f"the forward of {name}")
                self._handles.append(part.register_forward_pre_hook(hook))
            if "rowwise" in ways:
                self._handles.append(part.register_forward_hook(_with_whole_output))
        _split_attention()
        if run.plan.options.seed is None:  # ranks with one model need the same dropout
            seed = run.hooks.broadcast(run=run, obj=random.SystemRandom().randrange(2**31), src=0)
            seed_everything(seed + run.world.data_rank)
        return model

    def _distributed(self, parameter: Any, placement: Placement) -> nn.Parameter:
        assert self._mesh is not None
        # Without a source no rank sends anything: each takes its part of its own copy.
        value = distribute_tensor(
            parameter.detach(), self._mesh["model"], [placement], src_data_rank=None
        )
        if placement != Replicate():  # a part may be a view, which would keep the whole
            value = _from_local(value.to_local().clone(), value)
        return nn.Parameter(value, parameter.requires_grad)

    @hookimpl(wrapper=True)
    def forward(self, run: Run, method: str, args: tuple[Any, ...]) -> Generator[None, Any, Any]:
        self._expect(f"the forward of {method}")
        self._check_same(run, args[0])
        with _explained(run), _replicating():
            return map_tensors((yield), _whole)

    def _check_same(self, run: Run, batch: Any) -> None:
        """Compare batches and random numbers of the ranks that have one model together.

        Sums over these ranks would hide a difference.

        Raises:
            TrainingError: they differ.
        """
        if self._mesh is None or self._mesh["model"].size() == 1:
            return
        state = torch.get_rng_state()
        drawn = zlib.crc32(ctypes.string_at(state.data_ptr(), state.nbytes))
        values = torch.tensor([drawn, _digest(batch)], dtype=torch.float64)
        bounds = torch.stack([values, -values]).to(run.device)
        dist.all_reduce(bounds, dist.ReduceOp.MAX, self._mesh.get_group("model"))
        for i, name in enumerate(("random numbers", "batches")):
            if not torch.allclose(bounds[0, i], -bounds[1, i], 0.0, 0.0, equal_nan=True):
                hint = "draw them on each rank, or from a torch.Generator of your own"
                if name == "batches":
                    hint = "let geartrain shard the data, or read the same on each of these ranks"
                message = f"{run.plan.strategy.label}: ranks that have one model together have"
                raise TrainingError(f"{message} other {name}. Fix: {hint}")

    @hookimpl(wrapper=True)
    def backward(self, run: Run) -> Generator[None, Any, Any]:
        self._expect("the backward")
        with _explained(run), _replicating():
            return (yield)

    @hookimpl
    def reduce_gradients(self, run: Run) -> None:
        if run.mode == "automatic":
            assert run.model is not None
            parameters = list(run.model.parameters())  # a rank alone may have frozen some
            self.average_gradients(run, parameters, [p.grad is not None for p in parameters])

    def _expect(self, name: str, *_: object) -> None:
        if self._agreement is not None:
            self._agreement.expect(name)

    def average_gradients(
        self, run: Run, parameters: Sequence[nn.Parameter], changed: Sequence[bool]
    ) -> list[nn.Parameter]:
        """Add up the parts of gradients in each model, and average them over the models."""
        assert self._mesh is not None
        shards = cast("list[Any]", parameters)
        has = bytes(each.grad is not None for each in shards)
        self._expect(f"the reduction of {sum(has)} gradients (number {zlib.crc32(has)})")
        for each in shards:
            if each.grad is not None:
                each.grad = each.grad.redistribute(placements=each.placements)
        if run.world.data_size == 1:
            return [each for each, has in zip(parameters, changed, strict=True) if has]
        local = [nn.Parameter(each.to_local(), requires_grad=False) for each in shards]
        for part, each in zip(local, shards, strict=True):
            part.grad = None if each.grad is None else each.grad.to_local()
        averaged = average_gradients(run, local, changed, self._mesh.get_group("data"))
        numbers, found = {id(part) for part in averaged}, []
        for part, each in zip(local, shards, strict=True):
            if id(part) in numbers:
                if each.grad is None:  # a rank of another model has one
                    each.grad = _from_local(part.grad, each)
                found.append(each)
        return found

    @hookimpl
    def wrap_optimizer(self, run: Run, optimizer: Optimizer) -> Optimizer:
        with _replicating():
            return super().wrap_optimizer(run, optimizer)

    @hookimpl(wrapper=True)
    def optimizer_step(self) -> Generator[None, Any, Any]:
        with _replicating():
            return (yield)

    @hookimpl
    def all_gather(self, run: Run, tensor: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
        return super().all_gather(run, _whole(tensor))

    @hookimpl
    def on_run_end(self, run: Run) -> None:
        for handle in self._handles:
            handle.remove()
        if self._plain is not None:
            self._plain.restore(partial(self._whole, run), run.world.rank == 0)

    @hookimpl
    def teardown_process_group(self) -> None:
        self._mesh, self._plain, self._handles, self._agreement = None, None, [], None
        super().teardown_process_group()


def _mesh(run: Run, shape: tuple[int, int]) -> DeviceMesh:
    """Return the mesh of the models and the ranks of each.

    Under gloo it has process groups of its own. torch would use the default group, if there is one
    model, in which a collective of the user's would meet those of layers.
    """
    names = ("data", "model")
    if dist.get_backend() != "gloo":
        return init_device_mesh(run.device.type, shape, mesh_dim_names=names)
    numbers = torch.arange(run.world.size).view(shape)
    tables = numbers.T.tolist(), numbers.tolist()
    split: Any = dist.new_subgroups_by_enumeration
    groups = [split(table)[0] for table in tables]
    return DeviceMesh.from_group(groups, run.device.type, numbers, mesh_dim_names=names)


@contextmanager
def _explained(run: Run) -> Iterator[None]:
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        if "aten." not in str(error):
            raise
        cause = "torch cannot compute this with parts of layers"
        is_sparse = "sparse" in str(error)  # which fsdp refuses, too
        action = "sparse=False in nn.Embedding" if is_sparse else "--strategy fsdp"
        raise error_of_parts(run, error, cause, action) from error


@contextmanager
def _replicating() -> Iterator[None]:
    """Let operations of DTensors take tensors that each rank has whole.

    In manual optimisation a backward is within a step. torch's function would end it for the step.
    """
    dispatcher = DTensor._op_dispatcher
    before = dispatcher._allow_implicit_replication
    try:
        with implicit_replication():
            yield
    finally:
        dispatcher._allow_implicit_replication = before


def _is_named(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _split(layer: nn.Module, way: str, label: str) -> Iterator[tuple[nn.Parameter, Shard]]:
    """Yield the parameters of a layer that are split."""
    kinds = [kind for kind in _SPLITS if isinstance(layer, kind)]
    if not kinds:
        message = f"{label} is {type(layer).__name__}"
        raise UsageError(f"{message}, which cannot be split. Fix: name Linear or Embedding layers")
    for name, dim in _SPLITS[kinds[0]][way].items():
        parameter = layer._parameters[name]
        if parameter is not None:
            yield parameter, Shard(dim)


def _is_compiled(part: nn.Module) -> bool:
    """True for ``torch.compile(part)``, and after ``part.compile()``."""
    return "_orig_mod" in part._modules or part._compiled_call_impl is not None


def _is_metric(part: nn.Module) -> bool:
    """True for a metric of torchmetrics, whose code is not for DTensors."""
    return any(cls.__module__.partition(".")[0] == "torchmetrics" for cls in type(part).__mro__)


def _with_inputs(inputs: Callable[[Any], Any], _: nn.Module, args: Any, kwargs: Any) -> Any:
    """Gather the inputs of a metric, or of a module with buffers.

    torch would split BatchNorm's running mean as its input, and update a copy.
    """
    return map_tensors(args, inputs), map_tensors(kwargs, inputs)


def _with_whole_output(_: nn.Module, args: Any, output: Any) -> Any:
    """Add up the parts of a rowwise layer's output: torch cannot drop elements of parts."""
    return _replicated(output)


def _replicated(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor.redistribute(placements=[Replicate()]).to_local()
    # The backward of redistribute() alone fails for parts of a gradient and a rowwise Embedding.
    return DTensor.from_local(local, tensor.device_mesh, [Replicate()])


def _digest(batch: Any) -> float:
    """Return a number that depends on each tensor of a batch, and on the order of its samples."""
    total = 0.0

    def add(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        samples = tensor.detach().reshape(len(tensor) if tensor.ndim else 1, -1).double().sum(1)
        places = torch.arange(1, len(samples) + 1, dtype=torch.float64, device=tensor.device)
        total = 2 * total + float(samples @ places)
        return tensor

    map_tensors(batch, add)
    return total


def _from_local(local: Any, like: Any) -> Any:
    """Return a DTensor with this part, split as another one."""
    placement = {"device_mesh": like.device_mesh, "placements": like.placements}
    return DTensor.from_local(local, **placement, shape=like.shape, stride=like.stride())


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@cache
def _split_attention() -> None:
    """Let torch split attention on a CPU by heads, as it does on a GPU."""
    aten = torch.ops.aten
    for name, count, results in (("", 3, 2), ("_backward", 6, 3)):
        attention = getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{name}").default
        register_sharding(attention)(partial(_by_heads, count, results))


def _by_heads(count: int, results: int, *_: object, attn_mask: Any = None, **__: object) -> Any:
    """Return how attention may be computed: by heads, dimension 1, or whole on each rank."""
    has_heads = attn_mask is not None and attn_mask.ndim == 4 and attn_mask.shape[1] > 1
    found = []
    for placement in (Replicate(), Shard(1)):
        mask = [] if attn_mask is None else [placement if has_heads else Replicate()]
        found.append(([placement] * results, [*[placement] * count, None, None, *mask]))
    return found
