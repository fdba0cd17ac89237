"""Ranks of elastic as threads of the test's process, which start again after an error."""

import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from geartrain import Run
from geartrain_elastic import strategy
from geartrain_elastic.group import Group
from geartrain_elastic.hub import Hub, ProcessState
from geartrain_elastic.member import _Member
from geartrain_spawn.handover import Baseline, RankResult, apply_result, outcome
from geartrain_spawn.starter import pack


def in_threads(work: Callable[[int], Any], count: int) -> list[Any]:
    """Call ``work(number)`` in a thread each; return the results, or the errors raised."""
    results: list[Any] = [None] * count

    def call(number: int) -> None:
        try:
            results[number] = work(number)
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=call, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def hub_of(ranks: int) -> Hub:
    """Return the hub of a process that has all ranks of a run."""
    hub = Hub(ranks)
    hub.open_group(Group(None, 0, [range(ranks)], timedelta(seconds=1)))
    return hub


def use_threads(monkeypatch: Any) -> None:
    """Let elastic run its ranks in threads of this process, and take a snapshot after every step.

    After an error all ranks start again from the snapshot, as in a new process. The error is raised
    if it comes again in the same place.
    """
    monkeypatch.setattr(Hub, "is_due", lambda hub: True)
    monkeypatch.setattr(strategy, "run_in_members", _run_in_threads)


def _run_in_threads(run: Run, worker: Any, _: Any) -> Any:
    payload, start, ranks = pack(run, worker), ProcessState.now(), run.plan.processes or 1
    hub, last = hub_of(ranks), ("", 0)
    while True:
        results = in_threads(_Rank(hub, payload, start, ranks), ranks)
        start.restore()
        error = next((result for result in results if isinstance(result, Exception)), None)
        if error is None:
            return apply_result(run, results[0])
        if last == (last := (str(error), hub.done)):
            raise error
        kept, hub = hub.dump(), hub_of(ranks)
        hub.load(kept)


class _Rank:
    """The work of each rank, as in ``_Member``."""

    def __init__(self, hub: Hub, payload: Any, start: ProcessState, ranks: int) -> None:
        self.hub, self.payload, self.start = hub, payload, start
        job = SimpleNamespace(ranks=ranks, address="", port=0)
        self.member: Any = SimpleNamespace(_job=job, _hub=hub, _rank_store=dist.HashStore())
        self.member._fail = lambda rank, error: hub.fail(error)
        self.snapshots = [hub.seat(rank) for rank in range(ranks)]

    def __call__(self, rank: int) -> RankResult:
        try:
            self.hub.begin(rank, self.start)
            run, worker = self.payload.load()
            before = Baseline(run)
            _Member._prepare(self.member, run, rank, self.snapshots[rank])
            return outcome(run, worker(0), before)
        except Exception as error:
            self.hub.fail(error)
            raise
        finally:
            self.hub.finish(rank)
