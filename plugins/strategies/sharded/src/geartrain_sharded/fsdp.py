"""The strategies fsdp and ddp_sharded: each rank has a part of the training's tensors.

FullyShardedDataParallel: Zhao et al. 2023, https://arxiv.org/abs/2304.11277; ZeRO: Rajbhandari et
al. 2019, https://arxiv.org/abs/1910.02054
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from geartrain import Module, Plan, Run, TrainingError, UsageError, hookimpl
from geartrain.parallel import CollectiveOrder, refuse_sparse
from geartrain_sharded.dtensor_strategy import DTensorStrategy, error_of_parts
from geartrain_sharded.exchange import Exchange
from geartrain_sharded.materialize import Materializer
from geartrain_sharded.plain import PlainModules
from geartrain_sharded.tensors import return_freed_tensors
from geartrain_sharded.units import check_classes, units
from geartrain_sharded.usage import Usage

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class FSDPStrategy(DTensorStrategy):
    """Strategy ``fsdp``: as ``ddp``, with parameters, gradients and optimizer states in parts.

    Each rank keeps 1/N of them. Before a unit of the module runs, forward and backward, the ranks
    gather its parameters, and drop them after. torch's ``fully_shard`` does it. Gradients are
    reduced in each backward, also with accumulation: whole gradients would not fit.

    Checkpoints are those of one process: rank 0 gathers them, and any strategy reads them. After a
    run, rank 0's module has the whole weights, on the CPU. A module on the meta device gets its
    weights unit by unit, from ``reset_parameters()`` of its submodules.

    A gradient of gradients through a unit (``create_graph=True``) is refused: torch's
    ``fully_shard`` loses a part of it.

    Args:
        units: class names of the parts of the module that are gathered one at a time, such as
            ``["Block"]``; default: each part with at least ``unit_parameters``.
        unit_parameters: the least number of parameters of a unit, if ``units`` is not given.
        reshard_after_forward: drop a unit's gathered parameters after its forward. ``False``
            gathers once a step, and takes the memory of whole parameters.
        shard_size: ranks that share one copy of the tensors; other groups of so many ranks have
            copies (HSDP). Default: all ranks.
        param_dtype: compute, and send parameters, in ``"bfloat16"`` or ``"float16"``; the shards
            stay in their own dtype.
        offload: keep shards and optimizer states in the CPU's memory, on a GPU.
        find_unused_parameters: as for ddp. The units must run on each rank.
        process_group_backend: as for ddp.
        timeout: as for ddp.

    Raises:
        UsageError: an option has a value that cannot be used.
    """

    def __init__(
        self,
        units: Sequence[str] | str = (),
        unit_parameters: int = 1_000_000,
        reshard_after_forward: bool = True,
        shard_size: int | None = None,
        param_dtype: str | None = None,
        offload: bool = False,
        find_unused_parameters: bool = False,
        process_group_backend: str | None = None,
        timeout: float | timedelta = 1800.0,
    ) -> None:
        super().__init__(process_group_backend, timeout)
        for name, number in (("unit_parameters", unit_parameters), ("shard_size", shard_size)):
            if number is not None and number < 1:
                raise UsageError(f"{name}={number!r} must be above 0.")
        if param_dtype is not None and param_dtype not in _DTYPES:
            raise UsageError(f"param_dtype={param_dtype!r} must be {' or '.join(_DTYPES)}.")
        self.units = [units] if isinstance(units, str) else list(units)
        self.unit_parameters, self.shard_size = unit_parameters, shard_size
        self.reshard_after_forward, self.param_dtype = reshard_after_forward, param_dtype
        self.offload, self.find_unused_parameters = offload, find_unused_parameters
        #: Read by the conformance kit.
        self.capabilities = {"no_sync": False, "unused_parameters": find_unused_parameters}
        self._plain: PlainModules | None = None
        self._usage: Usage | None = None
        self._units: list[nn.Module] = []
        self._replicated: list[nn.Parameter] = []

    # --- hooks ------------------------------------------------------------------------------------

    @hookimpl  # hooks are called by argument name, so the override may add one
    def check_plan(self, plan: Plan, module: Module | type[Module]) -> None:  # type: ignore[override]
        super().check_plan(plan)
        label, processes = plan.strategy.label, plan.processes or 1
        if self.offload and plan.accelerator.name != "cuda":
            raise UsageError(f"{label}: offload needs a GPU. Fix: leave it out")
        if self.shard_size is not None and processes % self.shard_size:
            message = f"{label}: {processes} ranks are no multiple of shard_size={self.shard_size}"
            raise UsageError(f"{message}. Fix: use a shard_size that divides them")
        if isinstance(module, Module):
            check_classes(module, self.units, label)

    @hookimpl
    def wrap_model(self, run: Run, model: nn.Module) -> nn.Module:
        refuse_sparse(run)
        # A unit has one dtype. Parameters of another one are few, such as scales, and stay whole.
        dtypes = Counter(each.dtype for each in model.parameters())
        usual = max(dtypes, key=lambda dtype: dtypes[dtype], default=None)
        replicated = {name for name, each in model.named_parameters() if each.dtype != usual}
        dtype = None if self.param_dtype is None else _DTYPES[self.param_dtype]
        mesh, self._plain = self._mesh(run), PlainModules(model)
        found = units(run.module, self.units, self.unit_parameters)
        if run.mode == "manual":
            self._refuse_manual(run, model, found, replicated)
        materializer = Materializer(run)
        if run.device.type == "cpu":
            return_freed_tensors()
        for unit in [*found, model]:
            materializer.fill(unit)  # one after the other: the whole model may not fit
            ignored = {each for name, each in model.named_parameters() if name in replicated}
            fully_shard(
                unit,
                mesh=mesh,
                # The rest is needed from the first forward to the last backward.
                reshard_after_forward=self.reshard_after_forward and unit is not model,
                mp_policy=MixedPrecisionPolicy(param_dtype=dtype),
                offload_policy=CPUOffloadPolicy() if self.offload else OffloadPolicy(),
                ignored_params=ignored,
            )
        self._replicated = [p for name, p in model.named_parameters() if name in replicated]
        if hasattr(model, "set_reduce_scatter_unused_params"):  # torch 2.13
            # Otherwise ranks that use different parameters of a unit would send different bytes.
            model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
        self._usage, self._units = Usage(run, model, found), [*found, model]
        if run.world.size > 1 and hasattr(model, "set_custom_all_gather"):  # torch 2.9
            self._agree(run, found, model)
        return model

    @staticmethod
    def _agree(run: Run, found: Sequence[nn.Module], model: nn.Module) -> None:
        """Let the ranks agree on each gather and reduction, in a process group of their own."""
        agreement = CollectiveOrder(
            run, "run the same parts on each rank, in the same order, and let the loss need them"
        )
        group = dist.new_group() if dist.get_backend() == "gloo" else None
        names = {part: name for name, part in run.module.named_modules()}
        for unit in [*found, model]:
            name = names.get(unit, "what is in no unit")
            gather = Exchange(agreement, f"the gather of {name}", group)
            reduction = Exchange(agreement, f"the reduction of {name}", group)
            unit.set_custom_all_gather(gather)  # type: ignore[operator]
            unit.set_custom_reduce_scatter(reduction)  # type: ignore[operator]

    @staticmethod
    def _refuse_manual(
        run: Run, model: nn.Module, found: Sequence[nn.Module], replicated: set[str]
    ) -> None:
        """Refuse parameters outside of units that ``manual_backward`` would not train.

        ``fully_shard`` reduces their gradients in a backward after the model's forward. That of
        manual optimisation is in it.

        Raises:
            UsageError: with their names.
        """
        inside = {id(each) for unit in found for each in unit.parameters()}
        names = [
            name.removeprefix("module.")
            for name, each in model.named_parameters()
            if id(each) not in inside and name not in replicated
        ]
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise UsageError(
                f"{run.plan.strategy.label}: in manual optimisation parameters must be in units, "
                f"and these are in none: {', '.join(names[:5])}{more}. "
                "Fix: --strategy fsdp --strategy.unit_parameters 1, or --strategy ddp"
            )

    def _mesh(self, run: Run) -> DeviceMesh:
        size = self.shard_size or run.world.size
        if size == run.world.size:
            return init_device_mesh(run.device.type, (size,))
        shape, names = (run.world.size // size, size), ("replicate", "shard")
        return init_device_mesh(run.device.type, shape, mesh_dim_names=names)

    @hookimpl(wrapper=True)
    def forward(self, run: Run) -> Generator[None, Any, Any]:
        try:
            return (yield)
        except (NotImplementedError, RuntimeError) as error:
            if "DTensor" not in str(error):
                raise
            raise error_of_parts(
                run,
                error,
                "a step used parameters of a unit that it did not call, and each rank has a part",
                "--strategy.units CLASS, of parts it calls",
            ) from error

    @hookimpl(wrapper=True)
    def backward(self) -> Generator[None, Any, Any]:  # type: ignore[override]
        if self._usage is not None:  # the backward drops whole copies
            self._usage.keep_changes()
        return (yield)

    @hookimpl
    def reduce_gradients(self, run: Run) -> None:
        """Average the gradients of whole parameters; those of shards were during backward."""
        if self._usage is not None and run.mode == "automatic":
            self._usage.check(run, self.find_unused_parameters)
        if self._replicated and run.mode == "automatic":
            changed = [each.grad is not None for each in self._replicated]
            super().average_gradients(run, self._replicated, changed)

    def average_gradients(
        self, run: Run, parameters: Sequence[nn.Parameter], changed: Sequence[bool]
    ) -> list[nn.Parameter]:
        """Average the gradients of whole parameters; those of shards were during backward."""
        new = dict(zip(parameters, changed, strict=True))
        shards = [each for each, has in new.items() if has and isinstance(each, DTensor)]
        wholes = [each for each in new if not isinstance(each, DTensor)]
        return [*shards, *super().average_gradients(run, wholes, [new[each] for each in wholes])]

    @hookimpl
    def wrap_optimizer(self, run: Run, optimizer: Optimizer) -> Optimizer:
        optimizer.register_state_dict_pre_hook(partial(self._drop_wholes, run))
        return super().wrap_optimizer(run, optimizer)

    def _drop_wholes(self, run: Run, _: Optimizer) -> None:
        """Let the module have the optimizer's parameters, as checkpoints name them.

        Raises:
            TrainingError: a forward still needs whole copies.
        """
        self._reshard()
        if self._usage is not None and self._usage.has_wholes(run.module):
            raise TrainingError(
                f"{run.plan.strategy.label}: rank {run.world.rank} saves a checkpoint within a "
                "forward, which needs whole weights. Fix: save it in on_train_batch_end"
            )

    @hookimpl(wrapper=True)
    def model_state(self, run: Run) -> Generator[None, Any, Any]:
        self._reshard()
        return (yield from super().model_state(run))

    @hookimpl
    def on_validation_end(self) -> None:
        self._reshard()

    def _reshard(self) -> None:
        """Drop gathered parameters, which a unit may keep after a forward without a backward."""
        if self._usage is not None:
            self._usage.keep_changes()
        for unit in self._units:
            unit.reshard()  # type: ignore[operator]

    @hookimpl
    def on_run_end(self, run: Run) -> None:
        self._reshard()  # a plugin may have run a forward since then
        if self._usage is not None:
            self._usage.remove()
        if self._plain is not None:
            self._plain.restore(partial(self._whole, run), run.world.rank == 0)

    @hookimpl
    def teardown_process_group(self) -> None:
        self._plain, self._usage, self._units, self._replicated = None, None, [], []
        super().teardown_process_group()


class DDPShardedStrategy(FSDPStrategy):
    """Strategy ``ddp_sharded``: as ``ddp``, with gradients and optimizer states in parts.

    The ranks gather the parameters once a step, in its forward, and drop them in its backward. So a
    step sends what ddp sends. It is ``fsdp`` with ``reshard_after_forward=False``: ZeRO stage 2.

    Args:
        find_unused_parameters: as for ddp.
        process_group_backend: as for ddp.
        timeout: as for ddp.
    """

    def __init__(
        self,
        find_unused_parameters: bool = False,
        process_group_backend: str | None = None,
        timeout: float | timedelta = 1800.0,
    ) -> None:
        super().__init__(
            reshard_after_forward=False,
            find_unused_parameters=find_unused_parameters,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
