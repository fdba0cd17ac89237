"""The process that called ``fit``: pickle the run, start and watch the ranks, apply the result."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import util
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from geartrain import Run, TrainingError, UsageError
from geartrain.parallel import (
    ClusterEnvironment,
    Failure,
    Patience,
    Supervisor,
    raise_on_signals,
    reserve,
)
from geartrain_spawn import pickles, rank
from geartrain_spawn.files import AnonymousFile
from geartrain_spawn.handover import apply_result

#: The start methods of this system, the default first.
START_METHODS = [
    name
    for name in ("forkserver", "spawn", "fork")
    if name in multiprocessing.get_all_start_methods()
]

_numbers = itertools.count(1)


def run_in_ranks(
    run: Run, worker: Callable[[int], Any], start_method: str, timeout: timedelta
) -> Any:
    """Call ``worker`` in one new process per rank of this node.

    Args:
        run: the run; afterwards it and its objects are as after a run in this process.
        worker: called with the rank's number.
        start_method: ``"forkserver"``, ``"spawn"`` or ``"fork"``.
        timeout: how long a rank waits for the others.

    Returns:
        The result of ``worker`` in this node's first rank.

    Raises:
        UsageError: an object cannot be pickled; no process was started.
        TrainingError: a rank was killed, was stopped, hung or left. An exception that a rank raised
            is raised here as well, with its traceback as the cause.
    """
    _check(run, start_method)
    payload = (run, worker) if start_method == "fork" else pack(run, worker)
    logs = (
        Path(tempfile.mkdtemp(prefix="geartrain-logs-"))
        if run.output is None
        else run.output.absolute() / "logs"
    )
    logs.mkdir(parents=True, exist_ok=True)
    util.get_temp_dir()  # ranks and loader workers share it, so a killed one leaves no folder
    ranks = Ranks(start_method, logs)
    in_main_thread = threading.current_thread() is threading.main_thread()
    try:
        with raise_on_signals() if in_main_thread else nullcontext():
            number = next(_numbers)
            for place in reserve(run, timeout):
                ranks.start(place, number, timeout, payload)
            brought = ranks.outcome()
    finally:
        ranks.close()
        if isinstance(payload, AnonymousFile):
            payload.close()
    if run.output is None:
        shutil.rmtree(logs, ignore_errors=True)
    return apply_result(run, brought)


def refuse_launcher(run: Run) -> None:
    """Refuse to start processes in one of several that a launcher has started.

    Raises:
        UsageError: this process is one.
    """
    if run.cluster is not None or run.trainer.cluster is not None:
        place = run.cluster or run.trainer.cluster
        assert place is not None
        raise UsageError(
            f"{run.plan.strategy.label} starts its processes itself, but this process is one of "
            f"{place.size} that {place.launcher} started. Fix: --strategy ddp, which joins them"
        )


def _check(run: Run, start_method: str) -> None:
    label = run.plan.strategy.label
    refuse_launcher(run)
    if start_method == "fork" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise UsageError(
            f"{label}: start_method='fork' cannot be used after this process has used CUDA. "
            "Fix: start_method='forkserver'"
        )


def pack(run: Run, worker: Callable[[int], Any]) -> AnonymousFile:
    """Return a file with a run and its worker, which ranks load.

    Raises:
        UsageError: an object cannot be pickled; the message has the path to it.
    """
    payload = AnonymousFile()
    try:
        payload.dump((run, worker))
    except Exception as error:  # the user's __reduce__ or __getstate__ may raise anything
        payload.close()
        raise pickles.refusal(
            pickles.pickled_arguments(run, worker), error, run.plan.strategy.label
        ) from error
    return payload


@dataclass(slots=True)
class _Rank:
    """One rank; this process or multiprocessing's server forked its process."""

    process: multiprocessing.process.BaseProcess
    number: int
    answer: AnonymousFile
    error_file: Path

    @property
    def pid(self) -> int:
        return self.process.pid or 0

    @property
    def sentinel(self) -> int:
        return self.process.sentinel

    def poll(self) -> int | None:
        # A process that could not be started is not alive and has no exit code.
        return None if self.process.is_alive() else self.process.exitcode or 0

    def signal(self, number: int) -> None:
        if self.process.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def error(self) -> Failure | None:
        return Failure.read(self.number, self.error_file)

    def exception(self) -> BaseException | None:
        """Return the rank's exception, if it can be pickled and unpickled."""
        with suppress(Exception):
            if isinstance(answer := self.answer.load(), BaseException):
                return answer
        return None


class Ranks:
    """This node's ranks."""

    def __init__(self, start_method: str, logs: Path) -> None:
        self._start_method, self._logs = start_method, logs
        self._ranks: list[_Rank] = []
        self._supervisor = Supervisor(self._ranks, logs, Patience.from_environment())

    def start(
        self, place: ClusterEnvironment, number: int, timeout: timedelta, payload: Any
    ) -> None:
        """Start one rank. The node's first prints to this process's output, others to logs."""
        name = f"rank-{place.rank}"
        error_file = self._logs / f"{name}.error.json"
        error_file.unlink(missing_ok=True)
        job = rank.Job(
            place=place,
            number=number,
            timeout=timeout,
            payload=payload,
            answer=AnonymousFile(),
            log=self._logs / f"{name}.log" if place.local_rank else None,
            error_file=error_file,
            surroundings=None if self._start_method == "fork" else rank.Surroundings.here(),
        )
        process = start_context(self._start_method).Process(
            target=rank.main, args=(job,), name=name
        )
        self._ranks.append(_Rank(process, place.rank, job.answer, error_file))
        with without_main() if self._start_method != "fork" else nullcontext():
            process.start()

    def outcome(self) -> Any:
        """Wait for all ranks.

        Returns:
            The result of the first.

        Raises:
            TrainingError: a rank was killed, was stopped, hung or left.
            Exception: the exception that a rank raised.
        """
        if self._supervisor.watch():
            self._supervisor.unwind()
        remaining = [
            each.number
            for each in self._ranks
            if each.process.exitcode == 0 and each.answer.is_empty()
        ]
        verdict = self._supervisor.judge(left=remaining)
        if verdict is None:
            return self._ranks[0].answer.load()
        where = self._supervisor.show_log(verdict.ranks[0])
        if verdict.failure is None or not verdict.failure.traceback:
            raise TrainingError(verdict.message + where)
        raise _again(
            verdict.failure,
            next(each for each in self._ranks if each.number == verdict.failure.rank).exception(),
        )

    def close(self) -> None:
        """End every rank and close its files."""
        self._supervisor.end()
        for each in self._ranks:
            each.answer.close()
            # ValueError: the process is stuck in a device's driver and cannot be killed.
            with suppress(ValueError):
                each.process.close()


class RankError(Exception):
    """The traceback of an error in its rank: the cause of the error that the caller sees."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


def _again(failure: Failure, error: BaseException | None) -> BaseException:
    """Return the error to raise for a rank's, of the same type if it travelled, with its cause."""
    if isinstance(error, KeyboardInterrupt):  # its text may be "ended by SIGTERM"
        error = TrainingError(f"rank {failure.rank} was {str(error) or 'interrupted'}")
    elif isinstance(error, SystemExit):
        error = TrainingError(
            f"rank {failure.rank} left the program before the run ended ({failure.message})"
        )
    elif error is None:
        error = TrainingError(f"rank {failure.rank} failed: {failure.message}")
    else:
        error.add_note(f"raised on rank {failure.rank}")
    error.__cause__ = RankError(failure.traceback)
    return error


# --- start ----------------------------------------------------------------------------------------


def start_context(start_method: str = START_METHODS[0]) -> Any:
    """Return multiprocessing's context that starts a rank."""
    chosen = multiprocessing.get_context(start_method)
    if start_method == "forkserver":  # load torch, geartrain and ddp once, before the forks
        chosen.set_forkserver_preload(["geartrain_spawn.preload"])
    return chosen


@contextmanager
def without_main() -> Iterator[None]:
    """Keep ranks from running the caller's script again, inside the block.

    Its classes and functions travel by value. Without ``if __name__ == "__main__"``, the script
    would start a training in every rank.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
