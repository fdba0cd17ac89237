"""horovodrun's elastic mode: workers come and go, and the run resumes from its last commit.

A commit is a checkpoint in memory, the same on every rank. When a peer has gone, or the hosts have
changed, the run's worker ends with :class:`WorldChanged`. Horovod is then initialised again, which
waits until horovodrun has assigned new ranks, and the worker is called again. A new worker gets the
commit from a rank that has it.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from geartrain import Run, TrainingError
from geartrain_horovod.collectives import Collectives


class WorldChanged(TrainingError):
    """A peer has gone, or the hosts have changed. The run resumes after ``on_exception``."""


@dataclass(frozen=True, slots=True)
class Commit:
    """A checkpoint in memory from which a run resumes."""

    #: The number of commits before this one.
    number: int
    #: A checkpoint as torch.save writes it.
    data: bytes


class Elastic:
    """The commits of one process, and the loop around its worker.

    Args:
        every: steps from one commit to the next; ``None``: commit only at the start of each epoch,
            which happens in any case.
    """

    def __init__(self, every: int | None) -> None:
        self.every = every
        #: The number of the current fit, validate, test or predict call. The names of operations
        #: begin with it, so it must be the same on every rank.
        self.call = 0
        self.last: Commit | None = None
        self._changed = threading.Event()

    def on_hosts_updated(self, timestamp: int, result: Any) -> None:
        """Note that hosts have come or gone. Horovod's thread calls this on one rank."""
        self._changed.set()

    def keep_going(self, run: Run, worker: Callable[[], Any]) -> Any:
        """Call the worker until it ends without a change of the world.

        Returns:
            The worker's return value.
        """
        from horovod.common.elastic import notification_manager

        self.call, self.last = self.call + 1, None
        self._changed.clear()
        notification_manager.init()
        notification_manager.register_listener(self)
        try:
            while True:
                try:
                    return worker()
                except WorldChanged as change:
                    print(
                        f"geartrain: {change}; the run resumes in a new world",
                        file=sys.stderr,
                        flush=True,
                    )
                self._changed.clear()
                run.reset()
        finally:
            notification_manager.remove_listener(self)

    def agree(self, run: Run, collectives: Collectives) -> None:
        """Resume every rank from the newest commit that a rank has.

        Raises:
            TrainingError: the ranks are not in the same call of the program.
        """
        mine = torch.tensor([[self.call, -1 if self.last is None else self.last.number]])
        name = "geartrain.elastic"  # without the call's number, which may differ
        table = collectives.wait(
            collectives.start("allgather_async", mine, name=name), name, "agreement on a commit"
        )
        calls, numbers = table.T.tolist()
        if len(set(calls)) > 1:
            raise TrainingError(
                "elastic=True: a new worker started with call 1 of a trainer's fit, validate, test "
                f"or predict, while the others were in call {max(calls)}. "
                "Fix: make one call only in a program that grows or shrinks"
            )
        if max(numbers) >= 0:
            self.last = collectives.broadcast(self.last, numbers.index(max(numbers)))
            assert self.last is not None
            run.loop.memory_checkpoint = torch.load(
                io.BytesIO(self.last.data), map_location="cpu", weights_only=True
            )
            run.plan = replace(run.plan, resumes=True)

    def commit_epoch(self, run: Run, collectives: Collectives) -> None:
        """Commit at the start of an epoch, unless the run resumes in its middle."""
        if run.loop.resumed is None or not run.loop.resumed.batch_idx:
            self._commit(run, collectives)

    def commit_step(self, run: Run, collectives: Collectives) -> None:
        """Commit after every ``every`` steps, except after the last step."""
        if (
            self.every is not None
            and run.step % self.every == 0
            and run.step != run.plan.options.max_steps
        ):
            self._commit(run, collectives)

    def _commit(self, run: Run, collectives: Collectives) -> None:
        state = run.checkpoint(run.epoch)
        if run.world.size > 1:  # only rank 0 has every rank's state, and rank 0 may leave
            state["fit"]["ranks"] = collectives.broadcast(state["fit"]["ranks"], 0)
        file = io.BytesIO()
        torch.save(state, file)
        self.last = Commit(0 if self.last is None else self.last.number + 1, file.getvalue())
        changed = collectives.gather_values(
            torch.tensor([float(self._changed.is_set())], dtype=torch.float64)
        )
        if changed.any():
            raise WorldChanged(f"rank {run.world.rank}: the hosts have changed")
