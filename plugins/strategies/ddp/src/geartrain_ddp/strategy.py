"""The strategy ddp: one process per device, gradients averaged over all ranks during backward.

DistributedDataParallel: Li et al. 2020, https://arxiv.org/abs/2006.15704
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from geartrain import Plan, Run, TrainingError, UsageError, World, hookimpl
from geartrain.parallel import (
    ProcessGroupStrategy,
    announce_reduction,
    name_absent_ranks,
    refuse_sparse,
)
from geartrain.plugin_api import put_off_compiler
from geartrain_ddp import hookspecs
from geartrain_ddp.watchdog import limited

_BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")
_NOTHING: AbstractContextManager[None] = nullcontext()


class DDPStrategy(ProcessGroupStrategy):
    """Strategy ``ddp``: one process per device, trained with DistributedDataParallel.

    It starts the processes, or joins those that torchrun, SLURM or MPI started.

    Args:
        process_group_backend: torch.distributed backend; default nccl on cuda, gloo elsewhere.
        timeout: seconds, or a timedelta, that a rank waits for the others in one collective before
            the run ends with an error.
        find_unused_parameters: find the parameters that a step did not use, instead of waiting for
            their gradients. This costs time.
        gradient_as_bucket_view: make gradients views of the buckets, which saves memory.
        static_graph: promise that every step uses the same parameters in the same order.
        bucket_cap_mb: MiB of gradients in one all-reduce; default torch's, 25.

    Raises:
        UsageError: ``timeout`` is not above 0, or longer than a thread can wait.
    """

    hookspecs = hookspecs
    #: With these methods ``average_gradients`` can average after a step of which no micro-batch is
    #: the last. Read by geartrain-callbacks' fit_memory.
    averages_late = ("micro_step", "backward", "wrap_model", "configure_ddp", "reduce_gradients")
    _frozen: Sequence[nn.Parameter] = ()

    def __init__(
        self,
        process_group_backend: str | None = None,
        timeout: float | timedelta = 1800.0,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        bucket_cap_mb: float | None = None,
    ) -> None:
        if isinstance(timeout, timedelta):
            timeout = timeout.total_seconds()
        if not 0 < timeout <= threading.TIMEOUT_MAX:  # threads use the same timeout
            most = f"{threading.TIMEOUT_MAX:.0f}"
            raise UsageError(f"timeout={timeout!r} must be above 0 and at most {most} seconds.")
        #: Read by the conformance kit.
        self.capabilities = {"unused_parameters": find_unused_parameters}
        self.process_group_backend = process_group_backend
        self.timeout = timedelta(seconds=timeout)
        self.ddp_options: dict[str, Any] = {
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
        }
        if bucket_cap_mb is not None:
            self.ddp_options["bucket_cap_mb"] = bucket_cap_mb

    # --- to override in a subclass ----------------------------------------------------------------

    def init_dist_connection(self, run: Run) -> None:
        """Create the default process group; called once per process and run.

        ``run.store`` is a new store that every rank reaches; ``MASTER_ADDR`` and ``MASTER_PORT``
        name it.
        """
        place = run.cluster
        assert place is not None
        backend = self.process_group_backend or _default_backend(run.device.type)
        dist.init_process_group(
            backend, store=run.store, rank=place.rank, world_size=place.size, timeout=self.timeout
        )

    def configure_ddp(self, run: Run, model: nn.Module) -> nn.Module:
        """Wrap the model, which is on its device; called once per process and run."""
        ddp = _Model(run, model, device_ids=self.ddp_device_ids(run), **self.ddp_options)
        if run.hooks.implementers("reduce_bucket"):
            # A lambda, because DDP compares annotations with types, but here they are strings.
            ddp.register_comm_hook(
                run, lambda run, bucket: run.hooks.reduce_bucket(run=run, bucket=bucket)
            )
        return ddp

    def ddp_device_ids(self, run: Run) -> list[torch.device] | None:
        """Return the device to which DDP moves the inputs of its forward; ``None`` for no move."""
        return None if run.device.type == "cpu" else [run.device]

    def refuse_buckets(self, run: Run) -> None:
        """Raise if a plugin reduces buckets but the run has none.

        Raises:
            UsageError: a ``fit`` in manual optimisation.
        """
        if (
            self.hookspecs is not None  # a strategy without buckets takes the hook away
            and run.command == "fit"
            and run.mode == "manual"
            and (by := run.hooks.implementers("reduce_bucket"))
        ):
            raise UsageError(
                f"{by[0].label}: its reduce_bucket would never be called: "
                f"{type(run.module).__name__}.automatic_optimization is False, and manual_backward "
                "averages without DDP's buckets. "
                "Fix: remove the plugin, or use automatic optimisation"
            )

    def note_frozen(self, model: nn.Module) -> None:
        """Remember the frozen parameters, which no bucket has.

        A module that unfreezes one later trains it: its gradient is averaged apart.
        """
        self._frozen = [p for p in model.parameters() if not p.requires_grad]

    # --- hooks ------------------------------------------------------------------------------------

    @hookimpl
    def check_plan(self, plan: Plan) -> None:
        accelerator = plan.accelerator.name  # the device's type, unless it is a user's own class
        default = _default_backend(accelerator)
        backend = self.process_group_backend or default
        known = dict.fromkeys((default, *_BACKENDS))
        available = [name for name in known if plan.assumed or dist.is_backend_available(name)]
        right = [name for name in available if name == default or name != "nccl"]
        if backend not in right:
            hint = " or ".join(right) or "a torch built with a backend"
            raise UsageError(
                f"{plan.strategy.label}: process_group_backend={backend!r} cannot be used on "
                f"{accelerator}. Fix: {hint}"
            )

    @hookimpl
    def launch(self, run: Run, worker: Callable[[int], Any]) -> Any:
        self.refuse_buckets(run)
        refuse_sparse(run)
        return super().launch(run, worker)

    @hookimpl
    def setup_process_group(self, run: Run) -> World:
        place = run.cluster
        assert place is not None
        with name_absent_ranks(run):
            self.init_dist_connection(run)
        return World(
            dist.get_rank(),
            dist.get_world_size(),
            place.local_rank,
            place.local_size,
            place.node_rank,
        )

    @hookimpl
    def wrap_model(self, run: Run, model: nn.Module) -> nn.Module:
        refuse_sparse(run)
        # DDP refuses a model without trainable parameters, and evaluation calls the bare module.
        # Manual optimisation also calls the bare module, and manual_backward averages gradients:
        # DDP would only waste memory for its buckets.
        trains = (
            run.command == "fit"
            and run.mode != "manual"
            and any(parameter.requires_grad for parameter in model.parameters())
        )
        if run.command == "fit" and run.mode != "manual":
            self.note_frozen(model)
        return (
            self.configure_ddp(run, model.to(run.device))
            if trains
            else super().wrap_model(run, model)
        )

    @hookimpl
    def micro_step(self, run: Run, first: bool, last: bool) -> AbstractContextManager[Any]:
        # Gradients stay on this rank until the window's last micro-batch: one reduction per step.
        if last or not isinstance(run.model, DistributedDataParallel):
            return _NOTHING
        context: AbstractContextManager[Any] = run.model.no_sync()
        return context

    @hookimpl(wrapper=True)
    def backward(self, run: Run) -> Generator[None, Any, Any]:
        model = run.model
        if isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync:
            announce_reduction(run)
            if run.hooks.implementers("reduce_bucket"):
                with limited(run, self.timeout.total_seconds()):
                    return (yield)
        return (yield)

    @hookimpl
    def reduce_gradients(self, run: Run) -> None:
        """Check that each parameter has a gradient; DDP reduced them during backward.

        Parameters that the module has unfrozen are in no bucket of DDP, and are averaged here.

        Raises:
            TrainingError: a parameter has none; DDP would wait for it, and fail at the next step.
        """
        if run.mode == "automatic" and isinstance(run.model, _Model):
            run.model.check_gradients()
        if late := [parameter for parameter in self._frozen if parameter.requires_grad]:
            self.average_gradients(run, late, [parameter.grad is not None for parameter in late])

    @hookimpl
    def teardown_process_group(self) -> None:
        self._frozen = ()
        super().teardown_process_group()


class _Model(DistributedDataParallel):
    """DDP whose errors name the parameters that a step did not use.

    Args:
        run: this rank's run.
        model: the model on its device.
        options: DDP's.
    """

    def __init__(self, run: Run, model: nn.Module, **options: Any) -> None:
        with _without_compiler():
            super().__init__(model, **options)
        self._of_rank = f"{run.plan.strategy.label}: rank {run.world.rank}"
        self._names = [
            (name.removeprefix("module."), parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]
        self._checked = [] if self.find_unused_parameters or self.static_graph else self._names

    def forward(self, *args: Any, **options: Any) -> Any:
        try:
            return super().forward(*args, **options)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            if found is None:
                raise
            raise self._unused([self._names[int(i)][0] for i in found[1].split()]) from error

    def check_gradients(self) -> None:
        """Raise if a parameter has no gradient after backward.

        The other ranks may wait for it. torch would raise in the next step, if there is one.

        Raises:
            TrainingError: with the names of the parameters.
        """
        # Not `None in`, which asks each tensor `== None`: 40 µs a tensor.
        if any(parameter.grad is None for _, parameter in self._checked):
            raise self._unused([name for name, p in self._checked if p.grad is None])

    def _unused(self, names: list[str]) -> TrainingError:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        return TrainingError(
            f"{self._of_rank} did not use these parameters in a step: {', '.join(names[:5])}{more}."
            " Fix: --strategy.find_unused_parameters true"
        )


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Let DDP not import torch's compiler, which takes longer than the import of torch.

    DDP asks it whether it is to reduce gradients. By default it is not.
    """
    utils = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")
    stand_in: Any = SimpleNamespace(utils=utils)
    if put_off_compiler(DistributedDataParallel):
        torch._dynamo = stand_in
    try:
        yield
    finally:
        if vars(torch).get("_dynamo") is stand_in:
            del torch._dynamo  # torch imports it when something asks for it


def _default_backend(device_type: str) -> str:
    """Return torch's backend for a type of device; gloo for a type that torch does not know."""
    return dist.Backend.default_device_backend_map.get(device_type, "gloo")
