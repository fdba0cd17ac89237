"""A strategy for tests: its ranks are threads of this process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial, reduce
from typing import IO, Any, ClassVar

import torch
from torch import nn

from geartrain import Layout, Plan, PlanRequest, Run, UsageError, World, hookimpl
from geartrain.parallel import SeveralRanks, refuse_unequal, shard
from geartrain.plugin_api import ClusterEnvironment
from geartrain_testing.turns import Turns


class ThreadRanks:
    """Trains on the CPU in several threads of this process.

    Each thread is a rank with its own copy of module, data, plugins and trainer. Rank 0 is the
    calling thread and has the caller's objects. Ranks take turns: one runs until it reaches a
    collective, then the next one runs. Results equal those of processes, and are the same in every
    run. Each rank has its own global random generators, which start as copies of the caller's.

    Args:
        ranks: the number of ranks; default: one for each of ``devices``.
        first: the rank that runs first and is first in each collective. Try several: if ranks race
            for a file, a plugin may work with 0 and fail with 1.

    Raises:
        UsageError: ``ranks`` is below 1, or the rank ``first`` does not exist.
    """

    capabilities: ClassVar[dict[str, Any]] = {"multi_node": False, "timeout_option": None}
    #: A Session must launch a function, because a script cannot continue in several threads.
    needs_function = True

    def __init__(self, ranks: int | None = None, first: int = 0) -> None:
        if ranks is not None and ranks < 1:
            raise UsageError(f"ranks={ranks!r} must be 1 or more.")
        self.ranks, self.first = ranks, first
        #: Each rank's last run: ``runs[1].module``, ``runs[1].trainer``, ``runs[1].metrics``.
        self.runs: list[Run] = []
        self._turns = Turns(1)

    def __deepcopy__(self, memo: dict[int, Any]) -> ThreadRanks:
        return self  # one object serves all ranks: each hook gets its rank's run

    @property
    def errors(self) -> list[BaseException | None]:
        """The exceptions of the last run, by rank; ``None`` for a rank without one."""
        return self._turns.errors

    @property
    def results(self) -> list[Any]:
        """The return values of the last run, by rank: metrics, or predictions."""
        return self._turns.results

    @hookimpl
    def plan_processes(self, request: PlanRequest) -> Layout:
        return Layout(self.ranks or len(request.devices), 1)

    @hookimpl
    def check_plan(self, plan: Plan) -> None:
        if plan.accelerator.name != "cpu" or plan.num_nodes > 1:
            raise UsageError(
                f"{plan.strategy.label}: ranks are threads of this process, on the cpu, not on "
                f"{plan.num_nodes} node(s) with {plan.accelerator.name}. "
                "Fix: accelerator='cpu', num_nodes=1"
            )
        if not 0 <= self.first < (plan.processes or 1):
            raise UsageError(
                f"{plan.strategy.label}: first={self.first!r} must be one of the {plan.processes} "
                "ranks, which start at 0."
            )

    @hookimpl
    def launch(self, run: Run, worker: Callable[[int], Any]) -> Any:
        size = run.plan.processes or 1
        ranks = [(run, worker), *(_copy(run, worker) for _ in range(1, size))]
        self.runs = [rank_run for rank_run, _ in ranks]
        for rank, rank_run in enumerate(self.runs):
            rank_run.cluster = ClusterEnvironment("threads", rank, size, rank, size, 0)
        self._turns = Turns(size, self.first)
        self._turns.run([partial(function, rank) for rank, (_, function) in enumerate(ranks)])
        return self.results[0]

    @hookimpl
    def setup_process_group(self, run: Run) -> World:
        assert run.cluster is not None
        return World(
            run.cluster.rank,
            run.cluster.size,
            run.cluster.local_rank,
            run.cluster.local_size,
            run.cluster.node_rank,
        )

    @hookimpl
    def make_coordinator(self) -> SeveralRanks:
        return SeveralRanks()

    @hookimpl
    def shard_dataloader(self, run: Run, loader: Iterable[Any], stage: str) -> Iterable[Any]:
        return shard(run, loader, stage)

    @hookimpl
    def wrap_model(self, run: Run, model: nn.Module) -> nn.Module:
        tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
        for tensor, first in zip(
            tensors,
            self._exchange(run, "wrap_model", [tensor.clone() for tensor in tensors])[0],
            strict=True,
        ):
            tensor.copy_(first)
        return model

    @hookimpl
    def reduce_gradients(self, run: Run) -> None:
        parameters = list(run.parameters_of_step().values())  # ranks may have frozen others
        states = [
            p.grad.detach().clone() if p.requires_grad and p.grad is not None else None
            for p in parameters
        ]
        name = f"the reduction of {len(parameters)} gradients"
        for parameter, *grads in zip(parameters, *self._exchange(run, name, states), strict=True):
            found = [grad for grad in grads if grad is not None]
            if found:  # else the gradient stays None, as in one process
                mean = reduce(torch.add, [grad / run.world.size for grad in found])
                if parameter.grad is None or mean.is_sparse:  # a copy would miss other rows
                    parameter.grad = mean
                else:
                    parameter.grad.detach().copy_(mean)

    # --- collectives ------------------------------------------------------------------------------

    @hookimpl
    def log_sync(self, run: Run, values: torch.Tensor) -> torch.Tensor:
        return torch.stack(
            self._exchange(run, f"log_sync of {len(values)} numbers", values.clone())
        )

    @hookimpl
    def all_gather(self, run: Run, tensor: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
        table = self._exchange(run, "all_gather", tensor.detach().clone())
        refuse_unequal([part.shape for part in table], [part.dtype for part in table], tensor.dtype)
        return (
            torch.stack(table)
            if len({part.shape for part in table}) == 1
            else [part.clone() for part in table]
        )

    @hookimpl
    def broadcast(self, run: Run, obj: Any, src: int) -> Any:
        is_source = run.world.rank == src
        table = self._exchange(
            run, f"broadcast from rank {src}", pickle.dumps(obj) if is_source else b""
        )
        return obj if is_source else pickle.loads(table[src])

    @hookimpl
    def barrier(self, run: Run) -> None:
        self._exchange(run, "barrier", None)

    @hookimpl
    def teardown_process_group(self) -> None:
        """Do nothing: a group of torch.distributed belongs to the caller."""

    def _exchange(self, run: Run, what: str, value: Any) -> list[Any]:
        return self._turns.exchange(run.world.rank, what, value)


def _copy(run: Run, worker: Callable[[int], Any]) -> tuple[Run, Callable[[int], Any]]:
    """Return a copy of a run and its worker for another rank.

    Parts that the user gave by name are made again, as in a new process; the others are copied.

    Raises:
        UsageError: an object cannot be copied; the message has the path to it.
    """
    try:
        return copy.deepcopy((run, worker), {id(run.plan): run.plan})
    except Exception as error:  # __deepcopy__ and __getstate__ of users may raise any error
        label = run.plan.strategy.label
        hint = "Fix: make it in setup(), which runs on each rank, or leave it out in __getstate__"
        message = (
            f"the run cannot be copied, and each rank gets a copy ({type(error).__name__}: {error})"
        )
        # Without geartrain-spawn, the message does not name the attribute.
        with suppress(ImportError):
            from geartrain_spawn.pickles import pickled_arguments
            from geartrain_spawn.refusals import refusals

            arguments = pickled_arguments(run, worker).items()
            if found := next(
                (found for name, thing in arguments for found in refusals(name, thing, _dump)), None
            ):
                message = (
                    f"{found.path}: {found.what} cannot be copied, and each rank gets a copy "
                    f"({found.why})"
                )
        raise UsageError(f"{label}: {message}. {hint}") from error


def _dump(thing: Any, file: IO[bytes]) -> None:
    copy.deepcopy(thing)
