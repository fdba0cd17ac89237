"""A process of a run: it has some of the ranks, and may get those of another that has died."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore

from geartrain import Run, TrainingError, UsageError
from geartrain.parallel import ClusterEnvironment, raise_on_signals, rendezvous
from geartrain_elastic.group import Group
from geartrain_elastic.hub import Hub, ProcessState, Snapshot
from geartrain_parallel.forks import adopt_temporary_folder, guard_forks, let_children_die
from geartrain_parallel.rendezvous import SealedStore
from geartrain_spawn.files import AnonymousFile
from geartrain_spawn.handover import Baseline, outcome
from geartrain_spawn.pickles import pickle_by_value_for_workers
from geartrain_spawn.rank import Surroundings, die_with_starter, direct_output

#: Seconds in which processes connect to each other, once all of them are there.
_CONNECT = timedelta(seconds=20)
#: Seconds between two reports of a process that waits, and between two looks for news.
_PERIOD = 1.0
#: Seconds between two looks whether the ranks of a failed run have torn down.
_SOON = 0.05


@dataclass(frozen=True, slots=True)
class Generation:
    """The processes of a run, from one change of them to the next."""

    number: int
    #: The number of each process, and its ranks.
    members: tuple[tuple[int, tuple[int, ...]], ...]
    #: Rank -> the last error with which it failed, and the collectives that it had done.
    errors: dict[int, tuple[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Joined:
    """A process is connected to the others."""

    generation: int
    #: Collectives done.
    done: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A rank has ended."""

    rank: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank has raised an error."""

    rank: int
    #: The error's type and message.
    message: str
    #: The collectives that the rank had done.
    done: int
    traceback: str
    #: The pickled error, or nothing if it cannot be pickled.
    error: bytes
    #: True if the run ends with it; otherwise the process has ended, and another one tries again.
    is_final: bool


@dataclass(frozen=True, slots=True)
class Waits:
    """A process waits for others."""

    #: The generation, and the collectives done; -1 while its processes connect.
    place: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Stop:
    """The run is done, or ends with an error, which all ranks raise."""

    error: BaseException | None = None


@dataclass(slots=True)
class Job:
    """The task of one process."""

    number: int
    ranks: int
    #: True if the run began without this process, which then needs the state of all ranks.
    is_new: bool
    link: Connection
    #: The pickled run.
    payload: AnonymousFile
    #: The file for the result of rank 0.
    answer: AnonymousFile
    address: str
    port: int
    #: The name of the run in the store.
    key: str
    threads: int
    log: Path | None
    surroundings: Surroundings


def main(job: Job) -> None:
    """Serve ranks in a new process until the starter ends it."""
    die_with_starter()
    direct_output(job.log)
    # The starter decides; a terminal sends Ctrl-C to all processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    job.surroundings.take_over()
    pickle_by_value_for_workers()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    adopt_temporary_folder()
    torch.set_num_threads(job.threads)
    guard_forks()
    with raise_on_signals(()), suppress(EOFError, ConnectionError):  # the starter has gone
        _Member(job).serve()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of ranks may wait


class _Member:
    def __init__(self, job: Job) -> None:
        self._job, self._hub = job, Hub(job.ranks)
        store = rendezvous.connect(job.address, job.port, _CONNECT, job.number)
        self._store = SealedStore(store, f"{job.key}/")
        self._rank_store = SealedStore(store.clone(), f"{job.key}/run/")  # type: ignore[attr-defined]
        self._lacks_state = job.is_new
        self._random = ProcessState.now()
        self._ranks: set[int] = set()
        self._index = 0
        self._errors: dict[int, tuple[str, int]] = {}
        #: The generation that this process joins, or has joined.
        self._generation, self._connects = -1, False
        self._lock = threading.Lock()

    def serve(self) -> None:
        """Handle the starter's messages until it sends `Stop` or the run has failed."""
        generation: Generation | None = None
        threading.Thread(target=self._report_waits, daemon=True).start()
        while not self._hub.has_failed:
            ends = self._hub.error is not None
            if self._job.link.poll(_SOON if ends else _PERIOD):
                message = self._job.link.recv()
                if isinstance(message, Stop):
                    if message.error is None:
                        return
                    self._hub.fail(message.error)
                else:
                    generation = message
            elif not (ends or generation) and (lost := self._hub.lost) is not None:
                self._await_news(lost)
            if generation is not None and self._join(generation):
                generation = None

    def _report_waits(self) -> None:
        """Say every second that this process waits for others, while it does."""
        while True:
            time.sleep(_PERIOD)
            if self._connects or self._hub.is_meeting:
                done = -1 if self._connects else self._hub.done
                self._tell(Waits((self._generation, done)))

    def _await_news(self, lost: BaseException) -> None:
        """Wait for the next generation; if none comes, end this process with an error."""
        if not self._job.link.poll(_CONNECT.total_seconds()):
            self._fail(min(self._ranks, default=0), lost)

    def _tell(self, message: Any) -> None:
        with self._lock, suppress(OSError):
            self._job.link.send(message)

    # --- changes of the processes -----------------------------------------------------------------

    def _join(self, generation: Generation) -> bool:
        """Connect to the processes of a generation; False if another one comes meanwhile."""
        numbers = [number for number, _ in generation.members]
        self._generation, self._connects = generation.number, True
        self._hub.close_group()
        store = PrefixStore(str(generation.number), self._store)
        store.set(f"here/{self._job.number}", "1")
        while not store.check([f"here/{number}" for number in numbers]):
            if self._job.link.poll(0.002):
                return False
        self._index = numbers.index(self._job.number)
        try:
            group = Group(store, self._index, [ranks for _, ranks in generation.members], _CONNECT)
            self._align(group)
        except (RuntimeError, TrainingError) as error:  # a process has gone meanwhile
            self._await_news(error)
            return False
        self._errors = generation.errors
        for rank in dict(generation.members)[self._job.number]:
            if rank not in self._ranks:
                self._ranks.add(rank)
                self._start(rank)
        joined = Joined(generation.number, self._hub.done)
        self._connects = False
        self._hub.open_group(group)
        self._tell(joined)
        return True

    def _align(self, group: Group) -> None:
        """Give every process the newest result, and new ones the state of all ranks."""
        rows = group.gather(pickle.dumps(None if self._lacks_state else self._hub.done))
        done = [pickle.loads(row) for row in rows]
        most = max(count for count in done if count is not None)
        source = done.index(most)
        for index, count in enumerate(done):
            if count == most:
                continue
            if self._index == source:
                group.send(self._hub.dump() if count is None else self._hub.last_result(), index)
            elif self._index == index:
                data = group.receive(source)
                (self._hub.load if count is None else self._hub.add_result)(data)
        self._lacks_state = False

    # --- ranks ------------------------------------------------------------------------------------

    def _start(self, rank: int) -> None:
        snapshot = self._hub.seat(rank)
        threading.Thread(
            target=self._work, args=(rank, snapshot), name=f"rank-{rank}", daemon=True
        ).start()

    def _work(self, rank: int, snapshot: Snapshot | None) -> None:
        """Run one rank, from the beginning or from a state."""
        run: Run | None = None
        let_children_die()
        try:
            self._hub.begin(rank, self._random)
            run, worker = self._job.payload.load()
            before = Baseline(run) if rank == 0 else None
            self._prepare(run, rank, snapshot)
            result = worker(self._index)
            if before is not None:
                self._job.answer.dump(outcome(run, result, before))
            run = None
            self._tell(Ended(rank))
        except BaseException as error:
            if run is not None:
                run.hooks.explain(error, notes=False)
            self._fail(rank, error)
        finally:
            self._hub.finish(rank)

    def _prepare(self, run: Run, rank: int, snapshot: Snapshot | None) -> None:
        job = self._job
        place = ClusterEnvironment(
            "geartrain", rank, job.ranks, rank, job.ranks, 0, job.address, job.port
        )
        run.cluster = run.trainer.cluster = place
        run.store = self._rank_store
        run.loop.report_failure = partial(self._fail, rank)
        strategy: Any = next(
            part.plugin for part in run.hooks.parts if part.info.kind == "strategy"
        )
        strategy.hub = self._hub
        if snapshot is not None:
            run.loop.memory_checkpoint = snapshot.checkpoint()
            run.plan = replace(run.plan, resumes=True)
            strategy.go_on_from(run, run.loop.memory_checkpoint["fit"]["ranks"][rank])

    def _fail(self, rank: int, error: BaseException) -> None:
        """Report the error of a rank, and end this process if another one may try again."""
        if self._hub.error is not None:
            return
        message = f"{type(error).__name__}: {error}"
        pickled = b""
        with suppress(Exception):
            pickled = pickle.dumps(error)
        done = self._hub.done_by(rank)
        is_final = isinstance(error, UsageError) or self._errors.get(rank) == (message, done)
        text = "".join(traceback.format_exception(error)).rstrip()
        self._hub.error = error
        self._tell(Failed(rank, message, done, text, pickled, is_final))
        if not is_final:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


gc.freeze()
