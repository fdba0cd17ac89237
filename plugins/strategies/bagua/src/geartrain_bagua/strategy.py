"""The strategy ``bagua``: processes and process group of ddp, communication by an algorithm.

Source: Bagua, Gan et al. 2021, https://arxiv.org/abs/2107.01499
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from copy import copy
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from geartrain import Module, Plan, Run, UsageError, World, hookimpl
from geartrain.parallel import ProcessGroupStrategy, announce_reduction, refuse_sparse
from geartrain.plugin_api import load_optimizer, map_tensors
from geartrain_bagua import environment
from geartrain_bagua.algorithm import Algorithm, Context
from geartrain_bagua.buckets import make_buckets
from geartrain_bagua.channel import Channel
from geartrain_bagua.choosing import algorithm_class, make_algorithm, refuse_taken
from geartrain_bagua.hierarchy import node_peers, peers
from geartrain_bagua.reducer import GradientReducer
from geartrain_ddp import DDPStrategy

_NOTHING: AbstractContextManager[None] = nullcontext()
#: Hooks of the hot path and of pauses -> the methods of an algorithm that need them.
_FOR = {
    "micro_step": ("computing", "reduce"),
    "reduce_gradients": ("end_backward", "reduce"),
    "step": ("start_step", "computing", "end_step", "pause", "resume"),
    "on_step_end": ("computing",),
    "on_validation_start": ("pause", "resume"),
}
#: Methods for subclasses of ddp that this strategy never calls, because it does not use DDP.
_NOT_CALLED = ("configure_ddp", "ddp_device_ids")


class BaguaStrategy(DDPStrategy):
    """Start or join processes as ddp does, and keep ranks together by one of Bagua's algorithms.

    Args:
        algorithm: its name, its class or an object of it; ``geartrain_bagua.algorithms`` lists
            them.
        bucket_bytes: bytes of gradients or weights that are sent together; by default
            ``BAGUA_DEFAULT_BUCKET_SIZE``, or 10 MiB.
        find_unused_parameters: if True, a step may leave parameters unused, at the cost of one
            collective per step. If False, an unused parameter is an error.
        process_group_backend: backend of torch.distributed; by default nccl on cuda, gloo
            elsewhere.
        timeout: seconds, or a timedelta, that a rank waits for the others in one collective before
            the run fails.
        options: options of the algorithm.

    Raises:
        UsageError: the algorithm or one of the options is unknown, or a subclass has a method that
            is never called.

    Source:
        Gan et al. 2021, https://arxiv.org/abs/2107.01499
    """

    hookspecs: Any = None  # no reduce_bucket: only DDP's buckets call it

    def __init__(
        self,
        algorithm: Any = "gradient_allreduce",
        bucket_bytes: int | None = None,
        find_unused_parameters: bool = False,
        process_group_backend: str | None = None,
        timeout: float | timedelta = 1800.0,
        **options: Any,
    ) -> None:
        super().__init__(process_group_backend, timeout, find_unused_parameters)
        for method in _NOT_CALLED:
            if getattr(type(self), method) is not getattr(DDPStrategy, method):
                raise UsageError(
                    f"{type(self).__name__}.{method} would never be called: bagua does not use "
                    "DistributedDataParallel. Fix: use wrap_model, or a subclass of DDPStrategy"
                )
        if bucket_bytes is not None and (
            isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1
        ):
            raise UsageError(f"bucket_bytes={bucket_bytes!r} must be a whole number above 0.")
        self._bucket_bytes, self._unused = bucket_bytes, find_unused_parameters
        self._name, self._chosen = make_algorithm(algorithm, options)
        refuse_taken(type(self._chosen), type(self))
        #: The run's copy of the algorithm; before a run, the chosen object.
        self.algorithm: Algorithm = self._chosen
        self.capabilities = {**self.capabilities, **self._chosen.capabilities}
        #: True if the algorithm has no state, so a checkpoint does not keep a state for each rank.
        self.same_on_all_ranks = not _overridden(self._chosen, "state_dict")
        self._channel: Channel | None = None
        self._reducer: GradientReducer | None = None
        self._paused, self._failed, self._is_set_up = False, False, False
        for hook, methods in _FOR.items():
            if not any(_overridden(self._chosen, method) for method in methods):
                vars(self)[hook] = None  # not a method: no hookimpl, so the loop does not call it
        self._computes = _overridden(self._chosen, "computing")
        #: The context manager of ``computing`` for the current part of a step.
        self._part = ExitStack()

    @classmethod
    def more_options(cls, given: dict[str, Any]) -> list[type]:
        """Return the class of the chosen algorithm, whose options the command line accepts too."""
        chosen = algorithm_class(given.get("algorithm", "gradient_allreduce"))
        refuse_taken(chosen, cls)
        return [chosen]

    # --- before processes start -------------------------------------------------------------------

    @hookimpl
    # pluggy calls it by name, so the type checker's override error does not matter.
    def check_plan(self, plan: Plan, module: Module | type[Module]) -> None:  # type: ignore[override]
        super().check_plan(plan)
        environment.check(plan.strategy.label)
        self._chosen.check_plan(plan, module)

    @hookimpl
    def launch(self, run: Run, worker: Callable[[int], Any]) -> Any:
        refuse_sparse(run)
        label = f"{run.plan.strategy.label}: the algorithm {self._name!r}"
        if run.mode == "session" and not self._chosen.averages_gradients:
            raise UsageError(
                f"{label} cannot follow a Session's own loop. "
                "Fix: algorithm='gradient_allreduce', or geartrain.Trainer"
            )
        if run.command == "fit" and run.mode == "manual" and not self._chosen.averages_gradients:
            raise UsageError(
                f"{label} does not support manual optimisation, in which manual_backward averages "
                "gradients over all ranks. "
                "Fix: algorithm='gradient_allreduce', or automatic_optimization = True"
            )
        return ProcessGroupStrategy.launch(self, run, worker)

    # --- start and end ----------------------------------------------------------------------------

    @hookimpl
    def setup_process_group(self, run: Run) -> World:
        self.algorithm = copy(self._chosen)
        self._paused, self._failed, self._is_set_up = False, False, False
        return super().setup_process_group(run)

    @hookimpl
    def wrap_model(self, run: Run, model: nn.Module) -> nn.Module:
        return ProcessGroupStrategy.wrap_model(self, run, model)  # without ddp's wrapper

    @hookimpl(wrapper=True)
    def on_run_start(self, run: Run) -> Generator[None, Any, Any]:
        # In manual optimisation manual_backward averages gradients, in a Session reduce_gradients.
        if run.command == "fit" and run.mode == "automatic":
            self._begin(run)
        return (yield)  # later: plugins must see the weights that this rank trains

    def _begin(self, run: Run) -> None:
        for optimizer in run.optimizers:
            _same_state(run, optimizer)
        everyone = peers(range(run.world.size), self.timeout)
        assert everyone is not None
        hierarchical = self.algorithm.hierarchical
        node, leaders = node_peers(run, self.timeout) if hierarchical else (None, None)
        multiple = run.world.size if self.algorithm.pads else 1
        names = dict(run.module.named_parameters())
        size = self._bucket_bytes or environment.bucket_bytes()
        # Use rank 0's size: the environment variable may be set on one node only.
        size = run.hooks.broadcast(run=run, obj=size, src=0)
        buckets = make_buckets(names.values(), multiple, size)
        self._channel = Channel(run.device)
        context = Context(run, buckets, self._channel, everyone, node, leaders)
        self.algorithm.set_up(context)
        self._is_set_up = True
        if _overridden(self.algorithm, "reduce"):
            self._reducer = GradientReducer(context, self.algorithm, names, self._unused)

    @hookimpl(wrapper=True)
    def on_run_end(self) -> Generator[None, Any, Any]:
        # Every rank still exists, and plugins such as EMA have not yet replaced the weights.
        self._end()
        return (yield)

    @hookimpl
    def on_exception(self, run: Run, error: BaseException) -> None:
        super().on_exception(run, error)
        self._failed = True  # other ranks may be dead

    @hookimpl
    def teardown_process_group(self) -> None:
        try:
            self._end()
        finally:
            super().teardown_process_group()

    def _end(self) -> None:
        """Drop all references to process groups, which must not outlive the run.

        A second call does nothing.
        """
        channel, self._channel = self._channel, None
        if channel is None:
            return
        try:
            if self._is_set_up:
                self.algorithm.close(self._failed)
        finally:
            if self._reducer is not None:
                self._reducer.close()
            self._reducer = None
            vars(self.algorithm).pop("context", None)
            # After a failure the thread may be in a collective, which ends only when the run closes
            # its connections.
            channel.close(0.0 if self._failed else self.timeout.total_seconds())

    # --- a step -----------------------------------------------------------------------------------

    @hookimpl(wrapper=True)
    def step(self) -> Generator[None, None, None]:
        if self._paused:
            self._paused = False
            self.algorithm.resume()
        self.algorithm.start_step()
        with self._part:
            if self._computes:
                self._part.enter_context(self._computing())
            yield
        self.algorithm.end_step()

    @hookimpl
    def micro_step(self, run: Run, first: bool, last: bool) -> AbstractContextManager[Any]:
        if self._computes and not first:
            self._part.close()
            self._part.enter_context(self._computing())
        return self._reducer if last and self._reducer is not None else _NOTHING

    @hookimpl
    def reduce_gradients(self, run: Run) -> None:
        if self._channel is None:
            if run.mode == "session":
                groups = [group for o in run.optimizers for group in o.param_groups]
                parameters = list(dict.fromkeys(p for group in groups for p in group["params"]))
                used = [parameter.grad is not None for parameter in parameters]
                self.average_gradients(run, parameters, used)
            return
        announce_reduction(run)
        if self._reducer is not None:
            self._reducer.finish()
        self.algorithm.end_backward()

    @hookimpl(wrapper=True)
    def on_step_end(self) -> Generator[None, Any, Any]:
        with self._computing():  # plugins such as EMA read and write weights
            return (yield)

    def _computing(self) -> AbstractContextManager[Any]:
        """Return ``computing`` of the algorithm.

        It does nothing if ``average_gradients`` replaces the algorithm, as in manual optimisation.
        """
        return _NOTHING if self._channel is None else self.algorithm.computing()

    # --- pauses and checkpoints -------------------------------------------------------------------

    @hookimpl(wrapper=True)
    def on_validation_start(self) -> Generator[None, Any, Any]:
        self._pause()  # before a plugin replaces the weights
        return (yield)

    def _pause(self) -> None:
        """Keep the weights unchanged until the next step."""
        if self._channel is not None and not self._paused:
            self._paused = True
            self.algorithm.pause()

    def state_dict(self) -> dict[str, Any]:
        """Return the algorithm's name and its state on this rank.

        Core calls this on every rank, before it reads any other part of a checkpoint.
        """
        self._pause()
        return {"algorithm": self._name, "state": self.algorithm.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of ``state_dict``, before training starts.

        Raises:
            UsageError: the state is of another algorithm.
        """
        if state["algorithm"] != self._name:
            raise UsageError(
                f"the checkpoint is of the algorithm {state['algorithm']!r}, and this run's is "
                f"{self._name!r}. Fix: algorithm={state['algorithm']!r}, or load only its weights"
            )
        self.algorithm.load_state_dict(state["state"])


def _overridden(algorithm: Algorithm, method: str) -> bool:
    return getattr(type(algorithm), method) is not getattr(Algorithm, method)


def _same_state(run: Run, optimizer: Optimizer) -> None:
    """Copy the state and the options of rank 0's optimizer to this rank's."""
    if run.world.size == 1:
        return
    state = map_tensors(optimizer.state_dict(), torch.Tensor.cpu)
    first = run.hooks.broadcast(run=run, obj=state if run.world.rank == 0 else None, src=0)
    if run.world.rank and (
        first["state"]
        or state["state"]
        or repr(first["param_groups"]) != repr(state["param_groups"])
    ):
        load_optimizer(optimizer, first)
