"""The process that called ``fit``: hand the run over, start the ranks, watch them, take the outcome back."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, util
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from geartrain import Run, TrainingError, UsageError
from geartrain.parallel import Place, belongings, hear_signals, is_connection, is_timeout, reserve, stopped, take_back
from geartrain_spawn import pickles, rank
from geartrain_spawn.files import AnonymousFile

#: Those of the seeds that this system has, the default first.
START_METHODS = [name for name in ("forkserver", "spawn", "fork") if name in multiprocessing.get_all_start_methods()]
#: Seconds: for ranks to end by themselves after one has failed, and between asking a rank to end and killing it.
UNWIND, GRACE = 3.0, 5.0
#: Seconds after which a rank that has not heard is asked to end once more.
AGAIN = 1.0

_numbers = itertools.count(1)


def run_in_ranks(run: Run, worker: Callable[[int], Any], start_method: str, timeout: timedelta) -> Any:
    """Call ``worker`` in one fresh process for each of this node's ranks.

    Returns:
        What ``worker`` returned in this node's first rank; ``run`` and what belongs to it are as after a run in this process.

    Raises:
        UsageError: something cannot be handed over; nothing was started.
        TrainingError: a rank was killed, stopped, hung or left. A rank's own error is raised as it is, with its traceback as the cause.
    """
    _check(run, start_method)
    payload = (run, worker) if start_method == "fork" else _pack(run, worker)
    logs = Path(tempfile.mkdtemp(prefix="geartrain-logs-")) if run.output is None else run.output.absolute() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    util.get_temp_dir()  # ranks and their loader workers use it too: a killed one leaves no folder
    ranks = Ranks(start_method, logs)
    in_main_thread = threading.current_thread() is threading.main_thread()
    try:
        with hear_signals() if in_main_thread else nullcontext():
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
    return take_back(run, brought)


def _check(run: Run, start_method: str) -> None:
    label = run.plan.strategy.label
    if run.place is not None or run.trainer.place is not None:
        place = run.place or run.trainer.place
        assert place is not None
        raise UsageError(
            f"{label} starts its processes itself, and this is one of {place.size} that {place.launcher} has started. "
            "Fix: --strategy ddp, which joins them"
        )
    if start_method == "fork" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise UsageError(f"{label}: start_method='fork' cannot be used once this process has used CUDA. Fix: start_method='forkserver'")


def _pack(run: Run, worker: Callable[[int], Any]) -> AnonymousFile:
    payload = AnonymousFile()
    try:
        payload.dump((run, worker))
    except Exception as error:  # whatever a __reduce__ or __getstate__ of the user's raises
        payload.close()
        raise pickles.refusal(belongings(run, worker), error, run.plan.strategy.label) from error
    return payload


@dataclass(slots=True)
class _Rank:
    process: multiprocessing.process.BaseProcess
    number: int
    answer: AnonymousFile
    error_file: Path
    #: When it was seen to have ended or to end by its own error, in seconds since the epoch; ``None`` while it lives, and where it was
    #: told to end.
    ended: float | None = None

    def failed_at(self) -> float:
        """When its error came, before teardown; else when it was seen to have ended."""
        written = self._written()
        return (self.ended or time.time()) if written is None else written[0]

    def told(self) -> rank.Told | None:
        """Its error, once it has ended; ``None`` where it said nothing."""
        written = self._written()
        if self.process.exitcode and (self.process.exitcode > 0 or written is not None):
            # It may hold half of something, where it was killed while it wrote, or an error that can be pickled but not unpickled.
            with suppress(Exception):
                if isinstance(answer := self.answer.load(), rank.Told):
                    return answer
        return None if written is None else written[1]

    def _written(self) -> tuple[float, rank.Told] | None:
        """What it wrote when its error came, before teardown, and when that was, in seconds since the epoch."""
        try:
            message = json.loads(self.error_file.read_text())["message"]
            text = message["extraInfo"]["py_callstack"]
            told = rank.Told(None, message["message"].removesuffix(f"\n{text}"), text)
            return float(message["extraInfo"]["when"]), told
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


class Ranks:
    """This node's ranks."""

    def __init__(self, start_method: str, logs: Path) -> None:
        self._start_method, self._logs = start_method, logs
        self._ranks: list[_Rank] = []
        #: Those that had told no error when the first was told to end; ``None`` before that.
        self._silent: list[int] | None = None

    def start(self, place: Place, number: int, timeout: timedelta, payload: Any) -> None:
        """Start one rank; the first of this node prints where this process does, the others to their logs."""
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
        process = _context(self._start_method).Process(target=rank.main, args=(job,), name=name)
        self._ranks.append(_Rank(process, place.rank, job.answer, error_file))
        with _without_main() if self._start_method != "fork" else nullcontext():
            process.start()

    def outcome(self) -> Any:
        """Wait for all of them.

        Returns:
            What the first brought.

        Raises:
            TrainingError: one was killed, stopped, hung or left.
            Exception: a rank's own error.
        """
        held = stopped.Stopped()
        while running := {each.process.pid or 0: each for each in self._ranks if each.ended is None}:
            connection.wait([each.process.sentinel for each in running.values()], stopped.PERIOD)
            self._look()
            if too_long := [running[pid] for pid in held.too_long(running)]:
                self._kill(too_long)  # nothing else ends them; and those that wait for them in a collective are let go, to tear down
                self._unwind()
                raise TrainingError(f"{_named([each.number for each in too_long])} failed: {stopped.describe()}")
            if any(each.process.exitcode for each in self._ranks if each.ended is not None):
                self._unwind()
                self._raise()
        if left := self._left():
            raise self._left_error(left)
        return self._ranks[0].answer.load()

    def _alive(self) -> list[_Rank]:
        return [each for each in self._ranks if each.process.is_alive()]

    def _look(self) -> None:
        for each in self._ranks:
            if each.ended is None and not each.process.is_alive():
                each.ended = time.time()

    def _unwind(self) -> None:
        """One has failed: the others' collectives fail now, and they tear down. End those that do not."""
        deadline = time.monotonic() + UNWIND
        while (alive := self._alive()) and (left := deadline - time.monotonic()) > 0:
            connection.wait([each.process.sentinel for each in alive], left)
            self._look()
        self.end()

    def end(self) -> None:
        """End every rank that lives: SIGTERM, seconds to unwind, SIGKILL. Nothing is left of them."""
        alive = self._alive()
        if self._silent is None:  # afterwards one that hung in Python has told an error too: that it was asked to end
            self._silent = [each.number for each in alive if not each.error_file.exists()]
            for each in alive:
                if each.number not in self._silent:  # it has told its error and is slow to tear down: it has failed all the same
                    each.ended = time.time()
        self._ask_to_end()
        self._kill(self._alive())

    def _ask_to_end(self) -> None:
        # More than once: after Ctrl-C, which a terminal sends to ranks as well, a second signal on its heels may let the kernel hand both
        # to another thread of a rank, and then the main thread, where Python handles them, sleeps on in whatever it waits for.
        deadline = time.monotonic() + GRACE
        while (alive := self._alive()) and (left := deadline - time.monotonic()) > 0:
            for each in alive:
                if not each.error_file.exists():  # else it is on its way to its end
                    each.process.terminate()
            connection.wait([each.process.sentinel for each in alive], min(left, AGAIN))

    def _kill(self, ranks: list[_Rank]) -> None:
        for each in ranks:
            each.process.kill()
        for each in ranks:
            each.process.join()

    def close(self) -> None:
        """End every rank, and let go of what they left."""
        self.end()
        for each in self._ranks:
            each.answer.close()
            each.process.close()

    # --- whose error came first ------------------------------------------------------------------------------------------

    def _raise(self) -> None:
        failed = [each for each in self._ranks if each.ended is not None and each.process.exitcode != 0]
        told = {each.number: each.told() for each in failed}
        # A signal's victim says nothing; a lost connection says only that another has gone.
        failed.sort(key=lambda each: (_is_victim(told[each.number]), each.failed_at()))
        # One that crashes on its way out, after an error, has failed by that error.
        signalled = [each for each in failed if told[each.number] is None and (each.process.exitcode or 0) < 0]
        first = (signalled or failed)[0]
        answer = told[first.number]
        if answer is not None and not signalled and _is_victim(answer):
            self._blame_absent(answer)
        where = self._show_log(first)
        if signalled:
            raise TrainingError(f"rank {first.number} was ended by {signal.Signals(-(first.process.exitcode or 0)).name}{where}")
        if answer is None:
            raise TrainingError(f"rank {first.number} ended with exit code {first.process.exitcode} and said nothing{where}")
        raise _again(answer, first.number)

    def _blame_absent(self, answer: rank.Told) -> None:
        """Raise for the ranks that another rank lost, or for which it waited until the timeout."""
        left = self._left()
        if self._silent and is_timeout(answer.summary):
            # Those that waited say so, each in its own words; the one that they waited for says nothing.
            what = f"{_named(self._silent)} did not come to a collective within the strategy's timeout (hung or stopped)"
            raise TrainingError(f"{what}: {answer.summary}")
        if left:
            raise self._left_error(left)

    def _left(self) -> list[_Rank]:
        """Return the ranks that ended with exit code 0 and no result."""
        return [each for each in self._ranks if each.process.exitcode == 0 and each.answer.is_empty()]

    def _left_error(self, left: list[_Rank]) -> TrainingError:
        where = "".join([self._show_log(each) for each in left][:1])
        names = _named([each.number for each in left])
        return TrainingError(f"{names} left the program before the run ended (exit code 0, as after os._exit(0)){where}")

    def _show_log(self, failed: _Rank, lines: int = 40) -> str:
        """Print the end of a rank's output; where all of it is."""
        path = self._logs / f"rank-{failed.number}.log"
        tail = path.read_text(errors="replace").splitlines()[-lines:] if path.exists() else []
        if tail:
            print(f"--- the end of rank {failed.number}'s output ---", *tail, f"--- {path} ---", sep="\n", file=sys.stderr)
        return f"\n(its output: {path})" if path.exists() else ""


class RankError(Exception):
    """The traceback of an error as it was in its rank: the cause of the error that is raised in the caller."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


def _again(told: rank.Told, number: int) -> BaseException:
    """A rank's own error, to be raised here: of its own type, its traceback as its cause."""
    error: BaseException | None = told.error
    if isinstance(error, KeyboardInterrupt):
        error = TrainingError(f"rank {number} was {str(error) or 'interrupted'}")  # "ended by SIGTERM"
    elif isinstance(error, SystemExit):
        error = TrainingError(f"rank {number} left the program before the run ended ({told.summary})")
    elif error is None:
        error = TrainingError(f"rank {number} failed: {told.summary}")
    else:
        error.add_note(f"raised on rank {number}")
    error.__cause__ = RankError(told.traceback)
    return error


def _is_victim(answer: rank.Told | None) -> bool:
    return answer is not None and is_connection(answer.summary)


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


# --- starting ------------------------------------------------------------------------------------------------------------


def _context(start_method: str) -> Any:
    chosen = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        chosen.set_forkserver_preload(["geartrain_spawn.preload"])  # torch, geartrain and ddp are loaded once, and forked
    return chosen


@contextmanager
def _without_main() -> Iterator[None]:
    """Let no rank run the caller's script again: what is defined there has travelled by value, and a script that starts to train
    without asking for ``__name__ == "__main__"`` would do so in every rank."""
    own = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = own
