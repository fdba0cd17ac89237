"""Ranks that take turns in one process.

One thread runs at a time. At each collective the next rank gets the turn, so a run is
deterministic. A rank that does not reach a collective is an error at once. Processes would hang.
"""

from __future__ import annotations

import contextvars
import ctypes
import random
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from geartrain import TrainingError

#: Seconds that an interrupted run waits until a rank gives the turn to the next rank. After that it
#: raises KeyboardInterrupt in that rank, and waits once more.
PATIENCE = 2.0
#: Seconds between checks for Ctrl-C: Python misses one that arrives just before a thread blocks.
_LOOK = 0.2
#: Packages whose frames are not user code.
_NOT_THE_USERS = (
    "geartrain",
    "geartrain_parallel",
    "geartrain_testing",
    "pluggy",
    "torch",
    "threading",
    "contextlib",
)


class Turns:
    """Give turns to the ranks of a run, and exchange values at collectives.

    Args:
        size: the number of ranks.
        first: the rank that runs first and is first in each collective. The following ranks come
            next; after the last rank comes rank 0.
    """

    def __init__(self, size: int, first: int = 0) -> None:
        self.size, self.first = size, first
        #: Each rank's exception; ``None`` for a rank without one.
        self.errors: list[BaseException | None] = [None] * size
        #: The rank that failed first.
        self.failed: int | None = None
        #: Each rank's return value.
        self.results: list[Any] = [None] * size
        self._ended: set[int] = set()
        #: A rank waits for its turn at its gate. The rank before it opens the gate.
        self._gates = [threading.Lock() for _ in range(size)]
        for gate in self._gates:
            gate.acquire()
        #: The rank that runs.
        self._turn = first
        self._threads: list[threading.Thread] = []
        #: The current collective: rank -> the collective's name and the rank's value.
        self._meeting: dict[int, tuple[str, Any]] = {}

    def run(self, functions: Sequence[Callable[[], Any]]) -> None:
        """Call one function per rank: rank 0's in this thread, each other one in a new thread.

        The new threads have ended when this returns.

        Raises:
            BaseException: the first exception of a rank, with a note that names the rank.
        """
        self._begun = ProcessState.now()
        self._threads = [threading.current_thread()]
        for rank in range(1, self.size):
            context = contextvars.copy_context()
            thread = threading.Thread(
                target=context.run,
                args=(self._work, rank, functions[rank]),
                name=f"rank-{rank}",
                daemon=True,
            )
            self._threads.append(thread)
        started = self._threads[1:]
        for thread in started:
            thread.start()
        self._gates[self.first].release()
        self._work(0, functions[0])
        if started:
            self._wait(0)
        for thread in started:
            thread.join(PATIENCE)
        if self.failed is not None:
            raise self._first_error()

    def exchange(self, rank: int, what: str, value: Any) -> list[Any]:
        """Wait until every rank is in this collective.

        Args:
            what: the collective's name, the same on every rank.
            value: this rank's value. Other ranks read it now and later, so it must not change.

        Returns:
            The values of all ranks, by rank.

        Raises:
            TrainingError: a rank is in another collective, has ended or has failed.
        """
        self._refuse_after_failure(rank)
        if rank in self._meeting:
            self._meeting = {}  # every rank has been in the last collective
        meeting = self._meeting
        for other, (their, _) in meeting.items():
            if their != what:
                raise self._apart(
                    f"rank {other} is in {their}{self._place(other)}, "
                    f"and rank {rank} in {what}{self._place(rank)}"
                )
        meeting[rank] = (what, value)
        self._wait(rank)
        if len(meeting) == self.size:
            return [meeting[other][1] for other in range(self.size)]
        self._refuse_after_failure(rank)
        gone = min(set(range(self.size)) - meeting.keys())
        raise self._apart(
            f"rank {rank} is in {what}{self._place(rank)}, and rank {gone} has ended without it"
        )

    # --- turns ------------------------------------------------------------------------------------

    def _work(self, rank: int, function: Callable[[], Any]) -> None:
        """Run one rank, from its first turn to its last."""
        try:
            self._wait(rank, begins=True)
            if self.failed is not None:
                raise TrainingError(
                    f"rank {self.failed} failed before rank {rank} started"
                ) from self._first_error()
            self.results[rank] = function()
        except BaseException as error:  # pytest's skip and fail, and sys.exit, too
            self._fail(rank, error)
        self._ended.add(rank)
        if rank:
            self._hand_on(rank)

    def _wait(self, rank: int, begins: bool = False) -> None:
        """Run the other ranks until this rank's turn, then restore this rank's process state."""
        state = self._begun if begins else ProcessState.now()
        try:
            if not begins:
                self._hand_on(rank)
            while not self._gates[rank].acquire(timeout=_LOOK):
                pass
        except BaseException as error:  # Ctrl-C or a test's time limit, in the main thread
            self._fail(rank, error)
            if self._turn != rank:
                self._end_others(rank)
            self._gates[rank].acquire(blocking=False)  # the gate may be open by now
            raise
        finally:
            state.restore()

    def _hand_on(self, rank: int) -> None:
        """Give the turn to the next rank that has not ended, or to rank 0, which waits for all."""
        others = [(rank + i) % self.size for i in range(1, self.size + 1)]
        self._turn = next((other for other in others if other not in self._ended), 0)
        self._gates[self._turn].release()

    def _fail(self, rank: int, error: BaseException) -> None:
        if self.failed is None:
            self.failed = rank
            if self.size > 1:
                error.add_note(f"rank {rank} of {self.size} raised this")
        if self.errors[rank] is None:
            self.errors[rank] = error

    def _refuse_after_failure(self, rank: int) -> None:
        if self.failed is not None:
            error = self._first_error()
            raise TrainingError(
                f"rank {self.failed} has failed, so rank {rank} ends: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _first_error(self) -> BaseException:
        assert self.failed is not None
        error = self.errors[self.failed]
        assert error is not None
        return error

    def _end_others(self, rank: int) -> None:
        """Wait until the running rank reaches a collective, and interrupt it if it does not."""
        if not self._gates[rank].acquire(timeout=PATIENCE):
            for other in {*range(self.size)} - self._ended - {rank}:
                ident = ctypes.c_ulong(self._threads[other].ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ident, ctypes.py_object(KeyboardInterrupt)
                )
            self._gates[rank].acquire(timeout=PATIENCE)

    # --- for messages -----------------------------------------------------------------------------

    def _apart(self, what: str) -> TrainingError:
        return TrainingError(
            f"{what}: processes would deadlock. "
            "Fix: call the same collectives in the same order on all ranks"
        )

    def _place(self, rank: int) -> str:
        """Return the line of user code that a rank is in, as ``" (train.py:12)"``, or ``""``."""
        frame: FrameType | None = sys._current_frames().get(self._threads[rank].ident or 0)
        while frame is not None and frame.f_code is not Turns._work.__code__:
            if str(frame.f_globals.get("__name__")).partition(".")[0] not in _NOT_THE_USERS:
                return f" ({frame.f_code.co_filename}:{frame.f_lineno})"
            frame = frame.f_back
        return ""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """Global state that each rank has for itself: random generators, dtype, deterministic mode."""

    torch_random: torch.Tensor
    python_random: Any
    numpy_random: Any
    dtype: torch.dtype
    deterministic: tuple[bool, bool, bool]

    @classmethod
    def now(cls) -> ProcessState:
        """Return the process's current state."""
        numpy = sys.modules.get("numpy.random")
        return cls(
            torch.get_rng_state(),
            random.getstate(),
            None if numpy is None else numpy.get_state(),
            torch.get_default_dtype(),
            _deterministic(),
        )

    def restore(self) -> None:
        """Set the process's state to this one."""
        torch.set_rng_state(self.torch_random)
        random.setstate(self.python_random)
        if self.numpy_random is not None:
            sys.modules["numpy.random"].set_state(self.numpy_random)
        torch.set_default_dtype(self.dtype)
        if self.deterministic != _deterministic():  # only if it changed: it imports much of torch
            enabled, warn_only, torch.backends.cudnn.benchmark = self.deterministic
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def _deterministic() -> tuple[bool, bool, bool]:
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warn_only, torch.backends.cudnn.benchmark
