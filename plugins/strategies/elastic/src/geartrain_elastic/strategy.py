"""The strategy elastic: the training of a fixed number of ranks, on any number of processes."""

from __future__ import annotations

import ctypes
import os
import pickle
import threading
import time
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace as changed
from datetime import timedelta
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar
from zlib import crc32

import torch
from torch import nn

from geartrain import Layout, Plan, PlanRequest, Run, TrainingError, UsageError, World, hookimpl
from geartrain.parallel import SeveralRanks, refuse_sparse, refuse_unequal, shard
from geartrain.plugin_api import RankCoordinator, Stage
from geartrain_elastic.gradients import Gradients, spread
from geartrain_elastic.hub import Call, Hub, Result
from geartrain_elastic.seeding import seeded
from geartrain_elastic.starter import run_in_members
from geartrain_spawn.objects import RankObjects, has_storage, restore
from geartrain_spawn.pickles import dump

#: Ranks have not agreed yet.
UNKNOWN = "unknown"

#: Plugins that are refused, and why.
_REFUSED = {
    "async_checkpoint": "a process that dies would lose the file that it still writes",
    "preemption": "a signal to a process lets another one take its place",
}


class ElasticStrategy:
    """Strategy ``elastic``: equal bits on any number of processes, which may die.

    The training is that of ``virtual_ranks`` ranks, however many processes run them. If a process
    dies, another process takes over its ranks from the step in which it died; the others wait.

    Args:
        virtual_ranks: the ranks; default: one for each of ``devices``, the number of processes.
        replace: start a process in place of one that has died. Otherwise the others take over its
            ranks.
        min_processes: end the run if fewer are left, without ``replace``.
        timeout: seconds, or a timedelta. If processes have waited for others for so long, the
            starter kills these others, as if they had died.
        threads: of each process. Another number gives other bits.

    Raises:
        UsageError: a number is below 1, ``timeout`` is not above 0, or ``replace`` is no bool.
    """

    capabilities: ClassVar[dict[str, Any]] = {
        "multi_node": False,
        "recovers": True,
        "ranks_option": "virtual_ranks",
    }
    #: A session must be launched with a function: its processes have no other entry point.
    needs_function = True
    #: Pickles objects for a rank; ``geartrain doctor --pickle`` uses it to find objects that fail.
    dump = staticmethod(dump)

    def __init__(
        self,
        virtual_ranks: int | None = None,
        replace: bool = True,
        min_processes: int = 1,
        timeout: float | timedelta = 300.0,
        threads: int = 1,
    ) -> None:
        if isinstance(timeout, timedelta):
            timeout = timeout.total_seconds()
        if not 0 < timeout <= threading.TIMEOUT_MAX:
            most = f"{threading.TIMEOUT_MAX:.0f}"
            raise UsageError(f"timeout={timeout!r} must be above 0 and at most {most} seconds.")
        numbers = {"virtual_ranks": virtual_ranks, "min_processes": min_processes}
        for name, number in {**numbers, "threads": threads}.items():
            if number is not None and (not isinstance(number, int) or number < 1):
                raise UsageError(f"{name}={number!r} must be a whole number, 1 or more.")
        if not isinstance(replace, bool):
            raise UsageError(f"replace={replace!r} must be True or False.")
        self.virtual_ranks, self.replace, self.min_processes = virtual_ranks, replace, min_processes
        self.timeout, self.threads = timedelta(seconds=timeout), threads
        #: The ranks of this process; set in it.
        self.hub: Hub | None = None
        #: The result of the fit's first ``total_weight``, which says if losses have weights.
        self.weight: Any = UNKNOWN
        #: True if ranks have agreed that the training loaders have no more batches in this epoch.
        self.is_exhausted = False
        #: The rank's objects that no checkpoint contains; set when its fit begins.
        self.objects: RankObjects | None = None
        #: Of a rank that starts again, the state of its objects.
        self.saved_objects = b""
        #: Of a rank that starts again, the state of its data module, if that has one.
        self.saved_data: Any = None
        #: Of a rank that starts again, whether it wanted to stop, and whether ranks have agreed to.
        self.saved_stop = False, False
        #: True while a rank that starts again loads its state. It then keeps the loaders of its
        #: set-up, which the rank before it had, also if the data module's state is loaded.
        self.loads = False
        self._snapshot_is_due = False
        #: The caller of ``on_step_end``.
        self._on_step_end: Callable[..., Any] = _do_nothing
        #: See ``Call.phase``.
        self._phase = "start"

    def notes(self, plan: Plan) -> dict[str, str]:
        """Return the lines that the plan shows for this strategy."""
        then = "is replaced" if self.replace else "is not replaced"
        ranks, count = plan.processes, len(plan.devices)
        return {"system processes": f"{count} for {ranks} rank(s); a dead one {then}"}

    @hookimpl
    def plan_processes(self, request: PlanRequest) -> Layout:
        return Layout(self.virtual_ranks or len(request.devices), 1)

    @hookimpl
    def check_plan(self, plan: Plan) -> None:
        label, ranks = plan.strategy.label, plan.processes or 1
        if plan.accelerator.name != "cpu" or plan.num_nodes > 1:
            raise UsageError(
                f"{label} works with processes of one machine on the cpu, not on {plan.num_nodes} "
                f"node(s) with {plan.accelerator.name}. Fix: --strategy ddp"
            )
        if ranks < len(plan.devices):
            raise UsageError(
                f"{label}: virtual_ranks={ranks} are fewer than the {len(plan.devices)} processes "
                f"of devices. Fix: --devices {ranks}"
            )
        for name in ("async_checkpoint", "preemption"):
            if any(plugin.name == name for plugin in plan.plugins):
                raise UsageError(f"{label}: {_REFUSED[name]}. Fix: leave out {name}")
        if plan.options.reload_dataloaders_every_n_epochs > 1:
            raise UsageError(
                f"{label}: a rank that starts again cannot make the loaders of an earlier epoch. "
                "Fix: reload_dataloaders_every_n_epochs=1"
            )

    @hookimpl
    def launch(self, run: Run, worker: Callable[[int], Any]) -> Any:
        if run.mode == "session":
            raise UsageError(
                f"{run.plan.strategy.label}: a Session has no step at whose end a rank could start "
                "again. Fix: use Trainer.fit, or --strategy ddp_spawn"
            )
        refuse_sparse(run)
        return run_in_members(run, worker, self)

    @hookimpl
    def setup_process_group(self, run: Run) -> World:
        place = run.cluster
        assert place is not None
        return World(place.rank, place.size, place.local_rank, place.local_size, place.node_rank)

    @hookimpl
    def make_coordinator(self) -> RankCoordinator:
        return _Coordinator(self)

    @hookimpl
    def shard_dataloader(self, run: Run, loader: Iterable[Any], stage: str) -> Iterable[Any]:
        if self.loads:
            return loader
        sharded = shard(run, loader, stage)
        return seeded(sharded) if run.command == "fit" else sharded

    @hookimpl
    def wrap_model(self, run: Run, model: nn.Module) -> nn.Module:
        model = model.to(run.device)
        self.loads = run.loop.memory_checkpoint is not None  # which has the weights
        if self.loads:
            return model
        tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
        data = _bytes_of(tensors) if run.world.rank == 0 else b""
        self._phase = ""
        _copy(tensors, self._exchange(run, Call("wrap_model", data)).data[0])
        self._phase = "start"
        return model

    @hookimpl
    def reduce_gradients(self, run: Run) -> None:
        named = run.parameters_of_step()  # also frozen ones: ranks may have frozen others
        parameters = list(named.values())
        # As DDP: the next forward has rank 0's buffers. Rank 0 also says if a snapshot is due.
        buffers, data = list(run.module.buffers()), b""
        if run.world.rank == 0:
            assert self.hub is not None
            data = bytes([self.hub.is_due()]) + _bytes_of(buffers)
        grads = [p.grad if p.requires_grad else None for p in parameters]
        sent = self._reduce(run, named, parameters, grads, data).data[0]
        self._snapshot_is_due |= bool(sent[0])
        _copy(buffers, sent[1:])

    def average_gradients(
        self, run: Run, parameters: Sequence[nn.Parameter], changed: Sequence[bool]
    ) -> list[nn.Parameter]:
        """Average gradients over ranks; manual optimisation calls it after each backward.

        Returns:
            The parameters whose gradients were averaged.
        """
        grads = [p.grad if new else None for p, new in zip(parameters, changed, strict=True)]
        result = self._reduce(run, dict(run.module.named_parameters()), parameters, grads)
        return [parameters[index] for indices, _ in result.means for index in indices]

    def _reduce(
        self,
        run: Run,
        names: Iterable[str],
        parameters: Sequence[nn.Parameter],
        grads: Sequence[torch.Tensor | None],
        data: bytes = b"",
    ) -> Result:
        if any(grad is not None and grad.layout is not torch.strided for grad in grads):
            raise TrainingError(
                f"{run.plan.strategy.label}: sparse gradients cannot be averaged over ranks here. "
                "Fix: sparse=False in nn.Embedding"
            )
        gradients = Gradients(grads, parameters)
        # Gradients have no names on their way: ranks must have named parameters alike.
        number = crc32(",".join(names).encode())
        name = f"the reduction of {len(parameters)} gradients (number {number} of names)"
        result = self._exchange(run, Call(name, data, gradients))
        means, current = [], []
        for index, mean in spread(result.means, parameters):
            grad = parameters[index].grad
            if grad is None:
                parameters[index].grad = mean.clone()
            else:
                means.append(mean)
                current.append(grad.detach())
        if current:
            torch._foreach_copy_(current, means)
        return result

    @hookimpl(wrapper=True)
    def on_fit_start(self, run: Run) -> Generator[None, Any, Any]:
        self.loads = False
        results = yield
        if run.world.size > 1:
            self.objects = RankObjects(run, partial(in_checkpoints, run.module))
            self._on_step_end = run.hooks.replace_caller("on_step_end", self._end_step)
        return results

    def _end_step(self, run: Run) -> Any:
        """Call ``on_step_end`` of all plugins, also their wrappers; then take a snapshot if due."""
        results = self._on_step_end(run=run)
        if self._snapshot_is_due:
            assert isinstance(run.coordinator, _Coordinator)
            self._snapshot_is_due = False
            run.coordinator.snapshot(run)
        return results

    def kept_of(self, run: Run) -> dict[str, Any]:
        """Return what only this rank knows and no checkpoint contains, for :meth:`go_on_from`."""
        assert self.objects is not None
        return {
            "weight": self.weight,
            "exhausted": self.is_exhausted,
            "stop": (run.should_stop, run.logs.stop),
            "objects": self.objects.state(),
            "files": _ends(run) if run.world.rank == 0 else [],
        }

    def go_on_from(self, run: Run, state: dict[str, Any]) -> None:
        """Set the rank's state, with what :meth:`kept_of` returned, before it starts again.

        What was appended to files later is removed: the rank writes it again.
        """
        kept = state["elastic"]
        self.weight, self.is_exhausted = kept["weight"], kept["exhausted"]
        self.saved_objects, self.saved_stop = kept["objects"], kept["stop"]
        # A copy: the checkpoint's, which is loaded before it, may become a part of the data module.
        self.saved_data = deepcopy(state["parts"].get("datamodule"))
        for number, path, end in kept["files"]:
            if path.exists():
                cut = os.truncate if number is None else run.hooks.parts[number].plugin.cut
                cut(path, end)

    # --- where the run is -------------------------------------------------------------------------

    @hookimpl(wrapper=True)
    def on_sanity_check_start(self) -> Generator[None, Any, Any]:
        self._phase = ""
        return (yield)

    @hookimpl
    def on_sanity_check_end(self) -> None:
        self._phase = "start"

    @hookimpl(wrapper=True)
    def on_epoch_start(self) -> Generator[None, Any, Any]:
        self._phase = "epoch"
        return (yield)

    @hookimpl(wrapper=True)
    def on_train_batch_start(self) -> Generator[None, Any, Any]:
        self._phase = ""
        return (yield)

    # --- collectives ------------------------------------------------------------------------------

    @hookimpl
    def log_sync(self, run: Run, values: torch.Tensor) -> torch.Tensor:
        name = f"log_sync of {len(values)} numbers"
        rows = self._exchange(run, Call(name, array("d", values.tolist()).tobytes())).data
        return (
            torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.float64).view(
                len(rows), len(values)
            )
            if len(values)
            else values.new_empty(len(rows), 0)
        )

    @hookimpl
    def all_gather(self, run: Run, tensor: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
        tensor = tensor.detach().contiguous()
        data = pickle.dumps((tensor.dtype, list(tensor.shape), _bytes_of([tensor])))
        rows = [pickle.loads(row) for row in self._exchange(run, Call("all_gather", data)).data]
        refuse_unequal([row[1] for row in rows], [row[0] for row in rows], tensor.dtype)
        table = [torch.empty(shape, dtype=dtype) for dtype, shape, _ in rows]
        for each, (_, _, content) in zip(table, rows, strict=True):
            _copy([each], content)
        return torch.stack(table) if len({each.shape for each in table}) == 1 else table

    @hookimpl
    def broadcast(self, run: Run, obj: Any, src: int) -> Any:
        is_source = run.world.rank == src
        call = Call(f"broadcast from rank {src}", pickle.dumps(obj) if is_source else b"")
        data = self._exchange(run, call).data[src]
        # A source that starts again gets what it had sent: a time or a random name may differ now.
        return obj if is_source and data == call.data else pickle.loads(data)

    @hookimpl
    def barrier(self, run: Run) -> None:
        self._exchange(run, Call("barrier"))

    @hookimpl
    def teardown_process_group(self) -> None:
        """Do nothing: the process keeps its connections until all ranks have ended."""

    def _exchange(self, run: Run, call: Call) -> Result:
        assert self.hub is not None
        return self.hub.exchange(run.world.rank, changed(call, phase=self._phase))


class _Coordinator(SeveralRanks):
    """The common work of ranks, which also keep their states for each other."""

    def __init__(self, strategy: ElasticStrategy) -> None:
        self._strategy = strategy
        #: The states of all ranks, while a snapshot is taken.
        self._states: list[bytes] | None = None

    def check(self, run: Run, checkpoint: str | None = None) -> None:
        if run.loop.memory_checkpoint is None:  # otherwise the rank has passed it before
            super().check(run, checkpoint)

    def check_loaders(self, run: Run, stage: str, count: int) -> None:
        if not self._strategy.loads:
            super().check_loaders(run, stage, count)

    def count_batches(self, run: Run, name: str, stage: Stage) -> Stage:
        return run.stages[name] if self._strategy.loads else super().count_batches(run, name, stage)

    def total_weight(self, run: Run, weight: Any) -> Any:
        if run.loop.weights is not None:
            return super().total_weight(run, weight)
        strategy = self._strategy
        # The first loss of a rank that has started again is not the first of the run.
        if strategy.weight == UNKNOWN:
            strategy.weight = super().total_weight(run, weight)
        return strategy.weight

    def batches(self, run: Run, batches: Iterable[Any], limit: int | None) -> Iterator[Any]:
        trains, resumed = run.stage == "train", run.loop.resumed
        agrees = trains and run.current_stage.lengths_unknown
        if not trains or resumed is None or not resumed.batch_idx:
            found = super().batches(run, batches, limit)
            return self._watched(found) if agrees else found
        # These were there before: ranks need not agree on them.
        count, iterator = resumed.batch_idx - run.stages["train"].first, iter(batches)
        remaining = super().batches(run, iterator, None if limit is None else limit - count)
        if self._strategy.is_exhausted:
            remaining = iter(())
        if not count:  # the loader leaves them out by itself
            self._go_on(run)
        skipped = self._skipped(run, iterator, count)
        return chain(skipped, self._watched(remaining) if agrees else remaining)

    def _watched(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Note when ranks have agreed that no batch follows: it may be before the last step."""
        self._strategy.is_exhausted = False
        yield from batches
        self._strategy.is_exhausted = True

    def _skipped(self, run: Run, batches: Iterator[Any], count: int) -> Iterator[Any]:
        for number, batch in enumerate(islice(batches, count), 1):
            if number == count:
                self._go_on(run)
            yield batch

    def _go_on(self, run: Run) -> None:
        """Let a rank that has started again go on; the loop restores the rest of its state."""
        hub, objects = self._strategy.hub, self._strategy.objects
        assert hub is not None
        assert objects is not None
        self._strategy._phase = ""
        if (memory := run.loop.memory_checkpoint) is not None:
            # The events at the start of the epoch have come again: what they changed is set back.
            run.hooks.load_model_state(run=run, state=memory["model"])
            restore(objects.by_name, self._strategy.saved_objects)
            if self._strategy.saved_data is not None:
                data: Any = run.trainer.datamodule
                data.load_state_dict(self._strategy.saved_data)
            run.should_stop, run.logs.stop = self._strategy.saved_stop
        hub.go_on(run.world.rank)

    def gather_states(self, run: Run, local: dict[str, Any]) -> list[dict[str, Any]]:
        if self._states is not None:
            local = {**local, "elastic": self._strategy.kept_of(run)}
            self._states = self._strategy._exchange(run, Call("snapshot", pickle.dumps(local))).data
            return []
        data = self._strategy._exchange(run, Call("checkpoint", pickle.dumps(local))).data
        return [pickle.loads(each) for each in data] if run.world.rank == 0 else [local]

    def snapshot(self, run: Run) -> None:
        """Keep the state of all ranks at the end of this step."""
        hub = self._strategy.hub
        assert hub is not None
        self._states, began = [], time.monotonic()
        state = run.checkpoint(run.epoch)
        hub.keep(run.world.rank, state, self._states, began)
        self._states = None


def in_checkpoints(module: nn.Module) -> set[int]:
    """Return the ids of the memory that a checkpoint has."""
    tensors: list[torch.Tensor] = list(module.parameters())
    for part in module.modules():
        kept = part._buffers.keys() - part._non_persistent_buffers_set
        tensors += [part._buffers[name] for name in kept]  # type: ignore[misc]
    return {id(each.untyped_storage()) for each in tensors if has_storage(each)}


def _do_nothing(**_: object) -> None:
    """Do nothing: no run has begun."""


def _ends(run: Run) -> list[tuple[int | None, Path, int]]:
    """Return the files to which lines are appended, and their sizes.

    If a plugin counts in its own way, its number comes first; it cuts its files itself.
    """
    paths = [] if run.output is None else [run.output / "metrics.jsonl"]
    ends: list[tuple[int | None, Path, int]] = []
    for number, part in enumerate(run.hooks.parts):
        files: Any = getattr(part.plugin, "appended_files", list)()
        if isinstance(files, dict):
            ends += [(number, path, end) for path, end in files.items()]
        else:
            paths += files
    return [*ends, *((None, path, path.stat().st_size) for path in paths if path.exists())]


def _bytes_of(tensors: Sequence[torch.Tensor]) -> bytes:
    return b"".join(
        ctypes.string_at(same.data_ptr(), same.numel() * same.element_size())
        for same in (tensor.detach().contiguous() for tensor in tensors)
    )


def _copy(tensors: Sequence[torch.Tensor], data: bytes) -> None:
    """Copy data that :func:`_bytes_of` returned for tensors of the same shapes and types."""
    place, content = 0, bytearray(data)
    for tensor in tensors:
        if tensor.numel():
            size = tensor.numel() * tensor.element_size()
            source = torch.frombuffer(
                content, dtype=tensor.dtype, count=tensor.numel(), offset=place
            )
            tensor.detach().copy_(source.view(tensor.shape))
            place += size
