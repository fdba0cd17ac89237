"""The process that called ``fit``: start processes, replace those that die, return the result."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import pickle
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing import connection, util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geartrain import Run, TrainingError
from geartrain.parallel import (
    ClusterEnvironment,
    Patience,
    describe_exit,
    raise_on_signals,
    reserve,
)
from geartrain_elastic import member
from geartrain_elastic.member import Ended, Failed, Generation, Job, Joined, Stop, Waits
from geartrain_elastic.scale import REQUEST
from geartrain_parallel.supervisor import is_stopped
from geartrain_spawn.files import AnonymousFile
from geartrain_spawn.handover import apply_result
from geartrain_spawn.rank import Surroundings
from geartrain_spawn.starter import RankError, pack, refuse_launcher, start_context, without_main

if TYPE_CHECKING:
    from geartrain_elastic.strategy import ElasticStrategy

_numbers = itertools.count(1)
#: The most seconds between two looks at the processes.
_PERIOD = 1.0


def run_in_members(run: Run, worker: Callable[[int], Any], strategy: ElasticStrategy) -> Any:
    """Call ``worker`` for each rank of a run, in new processes.

    Args:
        run: the run; afterwards it and its objects are as after a run in this process.
        worker: called in each rank.
        strategy: with its options.

    Returns:
        The result of ``worker`` in rank 0.

    Raises:
        UsageError: an object cannot be pickled; no process was started.
        TrainingError: too many processes have died.
    """
    refuse_launcher(run)
    payload, answer = pack(run, worker), AnonymousFile()
    logs = (
        Path(tempfile.mkdtemp(prefix="geartrain-logs-"))
        if run.output is None
        else run.output.absolute() / "logs"
    )
    util.get_temp_dir()  # loader workers share it, so a killed process leaves no folder
    members = _Members(run, strategy, payload, answer, logs)
    in_main_thread = threading.current_thread() is threading.main_thread()
    try:
        with raise_on_signals() if in_main_thread else nullcontext():
            members.watch()
            result = answer.load()
    except KeyboardInterrupt as error:
        members.stop(KeyboardInterrupt(str(error)))
        raise
    finally:
        members.end()
        payload.close()
        if run.output is None:
            shutil.rmtree(logs, ignore_errors=True)
    applied = apply_result(run, result)
    answer.close()
    return applied


@dataclass(slots=True)
class _Process:
    """A process that this one has started."""

    number: int
    process: multiprocessing.process.BaseProcess
    link: Connection
    ranks: list[int]
    #: True once it has the state of all ranks.
    has_state: bool
    #: Where it waits for others, see :class:`Waits`, and when it has last said so.
    place: tuple[int, int] = (-1, -1)
    heard: float = -math.inf
    #: Seconds for which it has waited there, and for which it has been stopped (SIGSTOP).
    waited: float = 0.0
    stopped: float = 0.0
    #: The reason for which the starter has killed it.
    killed: str = ""
    failed: Failed | None = None

    @property
    def pid(self) -> int:
        return self.process.pid or 0


@dataclass(slots=True)
class _Members:
    """The processes of one run.

    Args:
        run: the caller's.
        strategy: with its options.
        payload: the pickled run.
        answer: for the result of rank 0.
        logs: the folder for output.
    """

    run: Run
    strategy: ElasticStrategy
    payload: AnonymousFile
    answer: AnonymousFile
    logs: Path
    _place: ClusterEnvironment = field(init=False)
    _key: str = field(init=False)
    _surroundings: Surroundings = field(init=False)
    _processes: dict[int, _Process] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)
    _errors: dict[int, tuple[str, int]] = field(default_factory=dict)
    _started: Iterator[int] = field(default_factory=itertools.count)
    #: The newest generation; the newest that processes have joined, and the collectives done then.
    _generation: int = -1
    _joined: tuple[int, int] = (-1, -1)
    #: The generation that followed, the rank, and the cause of each death of a rank since the run
    #: has last gone on.
    _deaths: list[tuple[int, int, str]] = field(default_factory=list)
    #: When this process has last looked for ranks that hang.
    _looked: float = field(default_factory=time.monotonic)
    #: Processes that take over all ranks once they have the state, and their ranks.
    _successors: list[tuple[_Process, list[int]]] = field(default_factory=list)

    def watch(self) -> None:
        """Start the processes, and replace those that die, until all ranks have ended.

        Raises:
            TrainingError: too many have died, or have hung.
            BaseException: the error of a rank.
        """
        plan = self.run.plan
        size, count = plan.processes or 1, len(plan.devices)
        self._place = reserve(self.run, self.strategy.timeout)[0]
        self._key = f"elastic/{next(_numbers)}"
        self._surroundings = Surroundings.here()
        for ranks in _dealt(size, count):
            self._start(ranks, is_new=False)
        self._publish()
        while len(self._ended) < size:
            self._look()
            self._scale(size)
        self.stop()

    def stop(self, error: BaseException | None = None) -> None:
        """Tell every process that the run is done, or ends with an error."""
        for each in self._processes.values():
            self._send(each, Stop(error))

    def _start(
        self, ranks: list[int], is_new: bool = True, later: list[int] | None = None
    ) -> _Process:
        """Start a process.

        Args:
            ranks: of the process.
            is_new: True if the run has begun without it.
            later: the ranks that it takes over later.
        """
        number = next(self._started)
        link, remote_end = multiprocessing.Pipe()
        job = Job(
            number=number,
            ranks=self.run.plan.processes or 1,
            is_new=is_new,
            link=remote_end,
            payload=self.payload,
            answer=self.answer,
            address=str(self._place.master_addr),
            port=int(self._place.master_port or 0),
            key=self._key,
            threads=self.strategy.threads,
            log=None if 0 in (later or ranks) else self.logs / f"process-{number}.log",
            surroundings=self._surroundings,
        )
        self.logs.mkdir(parents=True, exist_ok=True)  # again: somebody may have removed it
        process = start_context().Process(target=member.main, args=(job,), name=f"member-{number}")
        with without_main():
            process.start()
        remote_end.close()
        started = _Process(number, process, link, ranks, has_state=not is_new)
        self._processes[number] = started
        return started

    def _publish(self) -> None:
        """Tell every process which ones there are."""
        self._generation += 1
        members = tuple((each.number, tuple(each.ranks)) for each in self._processes.values())
        generation = Generation(self._generation, members, dict(self._errors))
        for each in self._processes.values():
            each.waited = 0.0  # its collective has failed
            self._send(each, generation)

    def _send(self, process: _Process, message: Any) -> None:
        with suppress(OSError):  # it has died: its sentinel says so
            process.link.send(message)

    # --- watching ---------------------------------------------------------------------------------

    def _look(self) -> None:
        """Wait until a process says something or ends, and act."""
        processes = list(self._processes.values())
        ready = connection.wait(
            [*(p.link for p in processes), *(p.process.sentinel for p in processes)], _PERIOD
        )
        dead = []
        for each in processes:
            if each.link in ready:
                self._read(each)
            if not each.process.is_alive():
                self._read(each)
                dead.append(each)
        dead += self._hung([each for each in processes if each not in dead])
        if dead:
            self._replace(dead)

    def _read(self, process: _Process) -> None:
        """Read what a process has said."""
        with suppress(EOFError, OSError):
            while process.link.poll():
                message = process.link.recv()
                if isinstance(message, Ended):
                    self._ended.add(message.rank)
                elif isinstance(message, Waits):
                    if message.place != process.place:
                        process.place, process.waited = message.place, 0.0
                    process.heard = time.monotonic()
                elif isinstance(message, Joined):
                    process.has_state = True
                    self._note(message)
                elif message.is_final:
                    raise self._final(message)
                else:
                    process.failed = message

    def _note(self, joined: Joined) -> None:
        number, done = self._joined
        if joined.generation > number:
            if joined.done > done:  # the run has gone on
                self._deaths = [death for death in self._deaths if death[0] > number]
            self._joined = joined.generation, joined.done
            self._refuse_third_death(-1, joined.generation)

    def _refuse_third_death(self, first: int, last: int) -> None:
        """End the run if a rank has died three times in the same place.

        Args:
            first: the generation before those that followed the deaths.
            last: the last of these generations.
        """
        deaths = {rank: text for number, rank, text in self._deaths if first < number <= last}
        counts = Counter(rank for number, rank, _ in self._deaths if first < number <= last)
        for rank, count in counts.items():
            if count >= 3:
                raise TrainingError(f"{deaths[rank]}, for the third time in the same place")

    def _final(self, failed: Failed) -> BaseException:
        self.stop(TrainingError(f"rank {failed.rank} has failed: {failed.message}"))
        self._wait_for_end()
        error: BaseException
        try:
            error = pickle.loads(failed.error)
            error.add_note(f"raised on rank {failed.rank}")
        except Exception:
            error = TrainingError(f"rank {failed.rank} failed: {failed.message}")
        error.__cause__ = RankError(failed.traceback)
        return error

    def _hung(self, processes: list[_Process]) -> list[_Process]:
        """Kill the processes for which the others have waited too long, and those that stand."""
        limit, patience = self.strategy.timeout.total_seconds(), Patience.from_environment()
        current = time.monotonic()
        # Only time in which this process runs counts: a whole job may be suspended and resumed.
        passed, self._looked = min(current - self._looked, 2 * _PERIOD), current
        for each in processes:
            each.stopped = each.stopped + passed if is_stopped(each.pid) else 0.0
            # A process that waits says so every second.
            each.waited = each.waited + passed if current - each.heard < 3.0 else 0.0
        others_wait = max((each.waited for each in processes), default=0.0) > limit
        for each in processes:
            if each.stopped > patience.stopped:
                each.killed = f"was stopped (SIGSTOP) for {patience.stopped:g} s"
            elif others_wait and not each.waited:
                each.killed = f"kept the others waiting for {limit:g} s (--strategy.timeout)"
            if each.killed:
                each.process.kill()
                each.process.join()
        return [each for each in processes if each.killed]

    def _replace(self, dead: list[_Process]) -> None:
        if self._successors:  # they have no ranks yet: ask again
            for successor, _ in self._successors:
                if successor not in dead:
                    self._kill(successor)
            self._successors = []
            print("geartrain: the number of processes stays", file=sys.stderr, flush=True)
        for each in dead:
            del self._processes[each.number]
            each.link.close()
        lost = [[rank for rank in each.ranks if rank not in self._ended] for each in dead]
        if not any(lost):
            self._publish()
            return
        described = "; ".join(map(_describe, dead))
        if not any(each.has_state for each in self._processes.values()):
            failed = next((each.failed for each in dead if each.failed is not None), None)
            if failed is not None:
                raise self._final(failed)
            raise TrainingError(f"no process with the state of the run is left: {described}")
        for each, ranks in zip(dead, lost, strict=True):
            cause = _describe(each)
            self._deaths += [(self._generation + 1, rank, cause) for rank in ranks]
            if each.failed is not None:
                self._errors[each.failed.rank] = each.failed.message, each.failed.done
            if self.strategy.replace and ranks:
                self._start(ranks)
            else:
                self._deal(ranks)
        self._refuse_third_death(self._joined[0], self._generation + 1)
        if len(self._processes) < self.strategy.min_processes:
            raise TrainingError(
                f"{described}, and {len(self._processes)} processes are left, fewer than "
                f"min_processes={self.strategy.min_processes}"
            )
        then = "another one takes its place" if self.strategy.replace else "the others go on"
        print(f"geartrain: {described}; {then}", file=sys.stderr, flush=True)
        self._publish()

    def _deal(self, ranks: list[int]) -> None:
        for rank in ranks:
            fewest = min(self._processes.values(), key=lambda each: len(each.ranks))
            fewest.ranks = sorted([*fewest.ranks, rank])

    # --- another number of processes --------------------------------------------------------------

    def _scale(self, size: int) -> None:
        """Change the number of processes if the command ``scale`` has asked for it.

        New processes get the state of all ranks. Then the others are killed, and the new ones take
        over their ranks, as after a death.
        """
        request = None if self.run.output is None else self.run.output / REQUEST
        if self._successors:
            if all(each.has_state for each, _ in self._successors):
                self._hand_over()
        elif request is not None and (count := _asked(request)) and 1 <= count <= size:
            parts = _dealt(size, count)
            self._successors = [(self._start([], later=part), part) for part in parts]
            self._publish()

    def _hand_over(self) -> None:
        successors = [each for each, _ in self._successors]
        for each in list(self._processes.values()):
            if each not in successors:
                self._kill(each)
        for each, ranks in self._successors:
            each.ranks = [rank for rank in ranks if rank not in self._ended]
        self._successors = []
        print(f"geartrain: {len(successors)} processes from now on", file=sys.stderr, flush=True)
        self._publish()

    def _kill(self, process: _Process) -> None:
        process.process.kill()
        process.process.join()
        del self._processes[process.number]
        process.link.close()

    # --- ending -----------------------------------------------------------------------------------

    def _wait_for_end(self) -> None:
        deadline = time.monotonic() + Patience.from_environment().grace
        for each in self._processes.values():
            each.process.join(max(0.0, deadline - time.monotonic()))

    def end(self) -> None:
        """End every process."""
        self._wait_for_end()
        for each in self._processes.values():
            if each.process.is_alive():
                each.process.kill()
            each.process.join()
            each.link.close()


def _dealt(size: int, count: int) -> list[list[int]]:
    """Return the ranks of each of ``count`` processes."""
    bounds = [size * i // count for i in range(count + 1)]
    return [list(range(first, end)) for first, end in itertools.pairwise(bounds)]


def _asked(request: Path) -> int | None:
    """Return the number of processes that a file asks for, and remove the file."""
    with suppress(OSError, ValueError):  # none, or not of the command
        if request.is_file():
            text = request.read_text(encoding="utf-8")
            request.unlink()
            return int(text)
    return None


def _describe(process: _Process) -> str:
    ranks = ", ".join(map(str, process.ranks))
    name = f"the process of rank{'s' * (len(process.ranks) > 1)} {ranks}"
    if process.failed is not None:
        return f"rank {process.failed.rank} failed: {process.failed.message}"
    return f"{name} {process.killed or describe_exit(process.process.exitcode or 0)}"
