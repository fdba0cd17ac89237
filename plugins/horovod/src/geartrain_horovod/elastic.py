"""horovodrun's elastic mode: workers come and go, and the run goes on from its last commit.

A commit is a checkpoint in memory, the same on every rank. When a peer has gone, or the hosts have changed, the run's worker ends with
:class:`WorldChanged`, Horovod is initialised anew, which waits until horovodrun has given every worker its new rank, and the worker is
called again. A worker that comes new gets the commit from one that has it.
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
from geartrain.plugin_api import checkpoint_state
from geartrain_horovod.collectives import Collectives


class WorldChanged(TrainingError):
    """A peer has gone, or the hosts have changed: the run goes on in a new world. What ``on_exception`` sees of it."""


@dataclass(frozen=True, slots=True)
class Commit:
    """What a run goes on from."""

    #: Commits before it.
    number: int
    #: A checkpoint as torch.save writes it.
    data: bytes


class Elastic:
    """The commits of one process, and the loop around its worker.

    Args:
        every: steps from one commit to the next, beside those at the beginning of each epoch; ``None``: only those.
    """

    def __init__(self, every: int | None) -> None:
        self.every = every
        #: Which call of the program this is: the same on every rank, since names of operations begin with it.
        self.call = 0
        self.last: Commit | None = None
        self._changed = threading.Event()

    def on_hosts_updated(self, timestamp: int, result: Any) -> None:
        """Horovod's thread hears from horovodrun, on one rank, that hosts have come or gone."""
        self._changed.set()

    def keep_going(self, run: Run, worker: Callable[[], Any]) -> Any:
        """Call the worker until a world stays as it is to the end.

        Returns:
            What the worker returned.
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
                        f"geartrain: {change}; the run goes on in a new world",
                        file=sys.stderr,
                        flush=True,
                    )
                self._changed.clear()
                run.again()
        finally:
            notification_manager.remove_listener(self)

    def agree(self, run: Run, collectives: Collectives) -> None:
        """Go on from the newest commit that a rank has, on every rank.

        Raises:
            TrainingError: the ranks are not in the same call of the program.
        """
        mine = torch.tensor([[self.call, -1 if self.last is None else self.last.number]])
        name = "geartrain.elastic"  # not under the call's number, which may differ
        table = collectives.wait(
            collectives.start("allgather_async", mine, name=name), name, "agreement on a commit"
        )
        calls, numbers = table.T.tolist()
        if len(set(calls)) > 1:
            raise TrainingError(
                f"elastic=True: a worker came new while the others were in call {max(calls)} of a trainer's fit, validate, test or "
                "predict: it begins the program at the first. Fix: one call in a program that is to grow or shrink"
            )
        if max(numbers) >= 0:
            self.last = collectives.broadcast(self.last, numbers.index(max(numbers)))
            assert self.last is not None
            run.memory_checkpoint = torch.load(
                io.BytesIO(self.last.data), map_location="cpu", weights_only=True
            )
            run.plan = replace(run.plan, resumes=True)

    def commit_epoch(self, run: Run, collectives: Collectives) -> None:
        """Commit at the beginning of an epoch, unless it is one that is taken up in its middle."""
        if run.resumed is None or not run.resumed.batch_idx:
            self._commit(run, collectives)

    def commit_step(self, run: Run, collectives: Collectives) -> None:
        """Commit where a step makes it due; not after the last, from where there is nothing to go on with."""
        if (
            self.every is not None
            and run.step % self.every == 0
            and run.step != run.plan.options.max_steps
        ):
            self._commit(run, collectives)

    def _commit(self, run: Run, collectives: Collectives) -> None:
        state = checkpoint_state(run, run.epoch)
        if (
            run.world.size > 1
        ):  # rank 0, which alone has what is every rank's own, may be the one that goes
            state["fit"]["ranks"] = collectives.broadcast(state["fit"]["ranks"], 0)
        file = io.BytesIO()
        torch.save(state, file)
        self.last = Commit(0 if self.last is None else self.last.number + 1, file.getvalue())
        changed = collectives.gather_values(
            torch.tensor([float(self._changed.is_set())], dtype=torch.float64)
        )
        if changed.any():
            raise WorldChanged(f"rank {run.world.rank}: the hosts have changed")
