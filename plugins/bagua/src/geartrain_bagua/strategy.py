"""Processes and process group are ddp's; what travels between ranks, and when, is an algorithm's.

Bagua: Gan et al. 2021, https://arxiv.org/abs/2107.01499
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from copy import copy
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from geartrain import Module, Plan, Run, UsageError, World, hookimpl
from geartrain.parallel import ProcessGroupStrategy
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
#: Hooks of the hot path and of pauses -> the methods of an algorithm for which they are there.
_FOR = {
    "micro_step": ("computing", "reduce"),
    "reduce_gradients": ("end_backward", "reduce"),
    "step": ("start_step", "computing", "end_step", "pause", "resume"),
    "on_step_end": ("computing",),
    "on_validation_start": ("pause", "resume"),
}
#: What ddp lets a subclass override, and nothing here would call: there is no DDP.
_NOT_CALLED = ("configure_ddp", "ddp_device_ids")


class BaguaStrategy(DDPStrategy):
    """Starts or joins processes as ddp does, and keeps ranks together by one of Bagua's algorithms.

    Args:
        algorithm: its name, its class or an object of it; see ``geartrain_bagua.algorithms`` for those there are.
        bucket_bytes: bytes of gradients or weights that travel together; default that of ``BAGUA_DEFAULT_BUCKET_SIZE``, or 10 MiB.
        find_unused_parameters: let steps leave parameters out, at a collective a step, instead of ending in an error.
        process_group_backend: torch.distributed's backend; default nccl on cuda, gloo elsewhere.
        timeout: seconds that a rank waits for the others in one collective before the run ends with an error.
        options: the algorithm's own.

    Raises:
        UsageError: no such algorithm, or options that it does not have; a subclass with a method that would not be called.
    """

    hookspecs: Any = None  # ddp's reduce_bucket is asked by DDP's buckets, which are not there

    def __init__(
        self,
        algorithm: Any = "gradient_allreduce",
        bucket_bytes: int | None = None,
        find_unused_parameters: bool = False,
        process_group_backend: str | None = None,
        timeout: float = 1800.0,
        **options: Any,
    ) -> None:
        super().__init__(process_group_backend, timeout, find_unused_parameters)
        for method in _NOT_CALLED:
            if getattr(type(self), method) is not getattr(DDPStrategy, method):
                raise UsageError(
                    f"{type(self).__name__}.{method} would never be called: bagua does not use DistributedDataParallel. "
                    "Fix: wrap_model, or a subclass of DDPStrategy"
                )
        if bucket_bytes is not None and (
            isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1
        ):
            raise UsageError(f"bucket_bytes={bucket_bytes!r} must be a whole number above 0.")
        self._bucket_bytes, self._unused = bucket_bytes, find_unused_parameters
        self._name, self._chosen = make_algorithm(algorithm, options)
        refuse_taken(type(self._chosen), type(self))
        #: The algorithm of the run; before one, as it was chosen.
        self.algorithm: Algorithm = self._chosen
        self.capabilities = {**self.capabilities, **self._chosen.capabilities}
        #: Whether a checkpoint need not keep each rank's state: there is none.
        self.same_on_all_ranks = not _overridden(self._chosen, "state_dict")
        self._channel: Channel | None = None
        self._reducer: GradientReducer | None = None
        self._paused, self._failed, self._is_set_up = False, False, False
        for hook, methods in _FOR.items():
            if not any(_overridden(self._chosen, method) for method in methods):
                vars(self)[hook] = None  # not a method: no hookimpl, so the loop does not call it
        self._computes = _overridden(self._chosen, "computing")
        #: What ``computing`` gave for the part of a step that goes on.
        self._part = ExitStack()

    @classmethod
    def more_options(cls, given: dict[str, Any]) -> list[type]:
        """The classes whose ``__init__`` has further options, for the command line: the chosen algorithm's."""
        chosen = algorithm_class(given.get("algorithm", "gradient_allreduce"))
        refuse_taken(chosen, cls)
        return [chosen]

    # --- before anything starts ------------------------------------------------------------------------------------------

    @hookimpl
    def check_plan(self, plan: Plan, module: Module | type[Module]) -> None:  # type: ignore[override]  # pluggy calls it by name
        super().check_plan(plan)
        environment.check(plan.strategy.label)
        self._chosen.check_plan(plan, module)

    @hookimpl
    def launch(self, run: Run, worker: Callable[[int], Any]) -> Any:
        label = f"{run.plan.strategy.label}: the algorithm {self._name!r}"
        if run.mode == "session" and not self._chosen.averages_gradients:
            raise UsageError(
                f"{label} cannot follow a Session's own loop. Fix: algorithm='gradient_allreduce', or geartrain.Trainer"
            )
        if run.command == "fit" and run.mode == "manual" and not self._chosen.averages_gradients:
            raise UsageError(
                f"{label} and manual optimisation do not go together: there manual_backward averages gradients over all ranks. "
                "Fix: algorithm='gradient_allreduce', or automatic_optimization = True"
            )
        return ProcessGroupStrategy.launch(self, run, worker)

    # --- beginning and end -----------------------------------------------------------------------------------------------

    @hookimpl
    def setup_process_group(self, run: Run) -> World:
        self.algorithm, self._paused, self._failed, self._is_set_up = (
            copy(self._chosen),
            False,
            False,
            False,
        )
        return super().setup_process_group(run)

    @hookimpl
    def wrap_model(self, run: Run, model: nn.Module) -> nn.Module:
        return ProcessGroupStrategy.wrap_model(
            self, run, model
        )  # not ddp's: nothing here wraps the model

    @hookimpl(wrapper=True)
    def on_run_start(self, run: Run) -> Generator[None, Any, Any]:
        # In manual optimisation manual_backward averages, and a Session has begun before this: see reduce_gradients.
        if run.command == "fit" and run.mode == "automatic":
            self._begin(run)
        return (yield)  # plugins find the weights that this rank trains

    def _begin(self, run: Run) -> None:
        for optimizer in run.optimizers:
            _same_state(run, optimizer)
        everyone = peers(range(run.world.size), self.timeout)
        assert everyone is not None
        node, leaders = (
            node_peers(run, self.timeout) if self.algorithm.hierarchical else (None, None)
        )
        multiple = run.world.size if self.algorithm.pads else 1
        names = dict(run.module.named_parameters())
        # Rank 0's: a variable may be set on one node only.
        size = run.hooks.broadcast(
            run=run, obj=self._bucket_bytes or environment.bucket_bytes(), src=0
        )
        buckets = make_buckets(names.values(), multiple, size)
        self._channel = Channel(run.device)
        context = Context(run, buckets, self._channel, everyone, node, leaders)
        self.algorithm.set_up(context)
        self._is_set_up = True
        if _overridden(self.algorithm, "reduce"):
            self._reducer = GradientReducer(context, self.algorithm, names, self._unused)

    @hookimpl(wrapper=True)
    def on_run_end(self) -> Generator[None, Any, Any]:
        self._end()  # now, while every rank is still here, and before a plugin puts other weights into the module, as EMA does
        return (yield)

    @hookimpl
    def on_exception(self) -> None:
        self._failed = True  # of others, that may be gone

    @hookimpl
    def teardown_process_group(self) -> None:
        try:
            self._end()
        finally:
            super().teardown_process_group()

    def _end(self) -> None:
        """Let go of everything that refers to a process group, which must not outlive its run. Called twice, it does nothing."""
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
            # After a failure the thread may be in a collective that ends only when this run's connections are closed.
            channel.close(0.0 if self._failed else self.timeout.total_seconds())

    # --- a step ----------------------------------------------------------------------------------------------------------

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
    def reduce_gradients(self, run: Run) -> None:  # type: ignore[override]
        if self._channel is None:
            if run.mode == "session":
                parameters = list(
                    dict.fromkeys(
                        p
                        for o in run.optimizers
                        for group in o.param_groups
                        for p in group["params"]
                    )
                )
                self.average_gradients(
                    run, parameters, [parameter.grad is not None for parameter in parameters]
                )
            return
        if self._reducer is not None:
            self._reducer.finish()
        self.algorithm.end_backward()

    @hookimpl(wrapper=True)
    def on_step_end(self) -> Generator[None, Any, Any]:
        with self._computing():  # plugins read and write weights there, as EMA does
            return (yield)

    def _computing(self) -> AbstractContextManager[Any]:
        """Return the algorithm's context. There is none if ``average_gradients`` replaces the algorithm, as in manual optimisation."""
        return _NOTHING if self._channel is None else self.algorithm.computing()

    # --- pauses and checkpoints ------------------------------------------------------------------------------------------

    @hookimpl(wrapper=True)
    def on_validation_start(self) -> Generator[None, Any, Any]:
        self._pause()  # before a plugin puts other weights into the module
        return (yield)

    def _pause(self) -> None:
        """Let weights stay as they are until the next step."""
        if self._channel is not None and not self._paused:
            self._paused = True
            self.algorithm.pause()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: the algorithm's, under its name. Core asks for it on every rank, before it looks at anything else that a
        checkpoint is made of."""
        self._pause()
        return {"algorithm": self._name, "state": self.algorithm.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state; before training starts.

        Raises:
            UsageError: it is of another algorithm.
        """
        if state["algorithm"] != self._name:
            raise UsageError(
                f"the checkpoint is of the algorithm {state['algorithm']!r}, and this run's is {self._name!r}. "
                f"Fix: algorithm={state['algorithm']!r}, or start from its weights alone"
            )
        self.algorithm.load_state_dict(state["state"])


def _overridden(algorithm: Algorithm, method: str) -> bool:
    return getattr(type(algorithm), method) is not getattr(Algorithm, method)


def _same_state(run: Run, optimizer: Optimizer) -> None:
    """Give an optimizer the state and the options of rank 0's."""
    if run.world.size == 1:
        return
    mine = map_tensors(optimizer.state_dict(), torch.Tensor.cpu)
    first = run.hooks.broadcast(run=run, obj=mine if run.world.rank == 0 else None, src=0)
    if run.world.rank and (
        first["state"] or mine["state"] or repr(first["param_groups"]) != repr(mine["param_groups"])
    ):
        load_optimizer(optimizer, first)
