"""The ranks of one process: they take turns, meet in collectives, and keep what a new one needs.

A rank is a thread with its own module, optimizers, plugins and random generators. One thread runs
at a time. At a collective the next one gets the turn; the last to arrive meets the other processes.

A rank is a function of its state at a step's end and of the results of the collectives since then.
Every process keeps both for all ranks. So another process can take over a rank whose process has
died: it sets the rank up with the recorded results of the set-up, loads the state, and runs the
rank with the results since then, up to the collective in which the others wait.
"""

from __future__ import annotations

import importlib
import math
import pickle
import random
import threading
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import torch

from geartrain import TrainingError
from geartrain.plugin_api import map_tensors
from geartrain_elastic.gradients import Flat, Gradients
from geartrain_elastic.group import Group

_numpy: Any = importlib.import_module("numpy.random") if find_spec("numpy") else None


@dataclass(frozen=True, slots=True)
class Call:
    """What one rank brings to a collective."""

    #: The collective, which must be the same on all ranks.
    name: str
    #: For all ranks.
    data: bytes = b""
    #: To average over ranks.
    gradients: Gradients | None = None
    #: ``"start"`` for a collective of the set-up, ``"epoch"`` for one before the first batch of an
    #: epoch: a rank that starts again in that epoch calls them again.
    phase: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """What every rank gets from a collective."""

    #: The collective.
    name: str
    #: Of each rank.
    data: list[bytes]
    #: The means of gradients.
    means: list[Flat] = field(default_factory=list)
    #: Of each rank, the digest of its gradients.
    digests: list[bytes] = field(default_factory=list)
    #: The error that all ranks raise.
    problem: str | None = None

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(map(len, self.data)) + sum(flat.nbytes for _, flat in self.means)


@dataclass(slots=True)
class Snapshot:
    """The state of all ranks at the end of a step."""

    #: The number of collectives before it.
    number: int
    #: A checkpoint as :meth:`geartrain.Run.checkpoint` returns it, with copies of its tensors.
    state: dict[str, Any]
    #: What each rank has for itself, pickled.
    ranks: list[bytes]
    #: Results of the collectives of the set-up and of the epoch's start.
    prelude: list[Result]

    def checkpoint(self) -> dict[str, Any]:
        """Return a checkpoint to load, whose tensors are copies."""
        state: dict[str, Any] = map_tensors(self.state, torch.clone)
        state["fit"]["ranks"] = [pickle.loads(each) for each in self.ranks]
        return state


@dataclass(slots=True)
class _Seat:
    """A rank of this process."""

    #: Collectives done.
    done: int
    #: The recorded results for the set-up of a rank that starts again; ``None`` otherwise, and
    #: once it has loaded its state.
    prelude: Iterator[Result] | None
    #: The rank gets the turn, or the run ends.
    turn: threading.Condition


@dataclass(frozen=True, slots=True)
class ProcessState:
    """Global state that each rank has for itself, while it has the turn."""

    torch_random: torch.Tensor
    python_random: Any
    #: The rank's own generator behind NumPy's functions: reading its state takes 0.06 ms.
    numpy_bits: Any
    #: A precision sets it in a step, also of manual optimisation, within which ranks meet.
    dtype: torch.dtype

    @classmethod
    def now(cls) -> ProcessState:
        bits = None if _numpy is None else _numpy.get_bit_generator()
        return cls(torch.get_rng_state(), random.getstate(), bits, torch.get_default_dtype())

    def copy(self) -> ProcessState:
        """Return the same state for another rank."""
        return replace(self, numpy_bits=deepcopy(self.numpy_bits))

    def restore(self) -> None:
        torch.set_rng_state(self.torch_random)
        random.setstate(self.python_random)
        if _numpy is not None:
            _numpy.set_bit_generator(self.numpy_bits)
        torch.set_default_dtype(self.dtype)


#: A snapshot is due when this many times its cost have passed: it costs 4% of the time, and a rank
#: that starts again repeats so much.
_RARELY = 25.0
#: Bytes of kept results after which a snapshot is due in any case.
_MUCH = 2**29


class Hub:
    """The ranks of this process, and what is kept of all ranks.

    Args:
        size: the number of all ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        #: The newest state at a step's end; ``None`` before the first.
        self.snapshot: Snapshot | None = None
        #: The error that every rank raises in its next collective.
        self.error: BaseException | None = None
        #: True while this process waits for others in a collective.
        self.is_meeting = False
        #: The error that closed the connections; ``None`` while there are some.
        self.lost: BaseException | None = None
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._group: Group | None = None
        self._seats: dict[int, _Seat] = {}
        self._turn: int | None = None
        #: What ranks brought to the collective in which they wait.
        self._calls: dict[int, Call] = {}
        #: Results since the snapshot. The last is kept in any case: another process may lack it.
        self._log: list[Result] = []
        #: Collectives before the first of ``_log``.
        self._first = 0
        #: Bytes of the results since the snapshot, the seconds that it took, and its end.
        self._bytes, self._cost, self._taken = 0, 0.0, -math.inf
        #: Results of the collectives of the set-up, and those of the epoch's start.
        self._start: list[Result] = []
        self._epoch: list[Result] = []
        self._last = Call("")
        #: The tensors of the snapshot, to copy into.
        self._buffers: list[torch.Tensor] = []

    # --- for ranks --------------------------------------------------------------------------------

    def begin(self, rank: int, state: ProcessState) -> None:
        """Wait for the first turn of a rank, which then has this state."""
        with self._changed:
            self._await_turn(rank)
        state.copy().restore()

    def exchange(self, rank: int, call: Call) -> Result:
        """Meet all ranks.

        Raises:
            TrainingError: another rank is in another collective.
            BaseException: the run ends.
        """
        with self._changed:
            if self.error is not None:
                raise self.error
            seat = self._seats[rank]
            if seat.prelude is not None:
                return _again(seat.prelude, rank, call.name)
            number = seat.done
            if number >= self._end:
                self._calls[rank] = call
            while number >= self._end:
                if len(self._calls) == len(self._seats):
                    self._complete()
                else:
                    self._yield_turn(rank)
                if self.error is not None:
                    raise self.error
            seat.done += 1
            result = self._log[number - self._first]
        if result.problem is not None:
            raise TrainingError(result.problem)
        if result.name != call.name:  # a rank that starts again must do as it did before
            others = next((r for r in range(self.size) if r != rank), rank)
            raise TrainingError(_apart(others, result.name, rank, call.name))
        if call.gradients is not None and call.gradients.digest != result.digests[rank]:
            raise TrainingError(
                f"rank {rank} cannot be taken over: it repeats a step, and its gradients differ. "
                "Fix: keep all that a step changes in parameters, buffers or state_dict(), and "
                "use a loader that repeats its batches; geartrain verify resume finds the cause"
            )
        return result

    def go_on(self, rank: int) -> None:
        """Let a rank that has started again go on from its state."""
        self._seats[rank].prelude = None

    def is_due(self) -> bool:
        """True if it is time for a snapshot. Ranks must agree on it."""
        passed = time.monotonic() - self._taken
        return passed >= _RARELY * self._cost or self._bytes >= _MUCH

    def keep(self, rank: int, state: dict[str, Any], ranks: list[bytes], began: float) -> None:
        """Keep the state of all ranks; one rank of this process is asked for what they share.

        Args:
            state: of :meth:`geartrain.Run.checkpoint`; its tensors are copied.
            ranks: what each rank has for itself.
            began: when the snapshot began, in seconds of ``time.monotonic``.
        """
        with self._changed:
            if rank != min(self._seats):
                return
            number = self._seats[rank].done
            if self.snapshot is not None and self.snapshot.number >= number:
                return
            state = {**state, "fit": {**state["fit"], "ranks": []}}
            prelude = [*self._start, *self._epoch]
            self.snapshot = Snapshot(number, self._copied(state), ranks, prelude)
            self._taken, self._bytes = time.monotonic(), 0
            self._cost = self._taken - began

    def finish(self, rank: int) -> None:
        """Give the turn to another rank: this one has ended."""
        with self._changed:
            del self._seats[rank]
            self._calls.pop(rank, None)
            self._next_turn(rank)

    # --- for the process's main thread ------------------------------------------------------------

    @property
    def done(self) -> int:
        """The number of collectives of which this process has the result."""
        return self._end

    def done_by(self, rank: int) -> int:
        """Return the number of collectives that a rank of this process has done."""
        return self._seats[rank].done if rank in self._seats else 0

    @property
    def has_failed(self) -> bool:
        """True if the run ends with an error, and the ranks of this process have torn down."""
        return self.error is not None and not self._seats

    def seat(self, rank: int) -> Snapshot | None:
        """Add a rank; return the state from which it starts."""
        with self._changed:
            known = self.snapshot
            done, prelude = (0, None) if known is None else (known.number, iter(known.prelude))
            self._seats[rank] = _Seat(done, prelude, threading.Condition(self._lock))
            if self._turn is None:
                self._turn = rank
            self._changed.notify_all()
            return self.snapshot

    def close_group(self) -> None:
        """Close the connections, and wait until no rank uses them."""
        with self._changed:
            if self._group is not None:
                self._group.close()
            self._changed.wait_for(lambda: not self.is_meeting)
            self._group = None

    def open_group(self, group: Group) -> None:
        """Let ranks meet again."""
        with self._changed:
            self._group, self.lost = group, None
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Let every rank of this process raise an error."""
        with self._changed:
            self.error = self.error or error
            if self._group is not None:
                self._group.close()
            self._changed.notify_all()
            for seat in self._seats.values():
                seat.turn.notify()

    def dump(self) -> bytes:
        """Return all that a new process needs to take over ranks."""
        with self._changed:
            return pickle.dumps((self.snapshot, self._first, self._log, self._start, self._epoch))

    def load(self, data: bytes) -> None:
        """Take over what :meth:`dump` returned in another process."""
        with self._changed:
            loaded = pickle.loads(data)
            self.snapshot, self._first, self._log, self._start, self._epoch = loaded

    def last_result(self) -> bytes:
        """Return the newest result, for a process that lacks it."""
        with self._changed:
            return pickle.dumps((self._last, self._log[-1]))

    def add_result(self, data: bytes) -> None:
        """Add the result of the collective in which this process waits."""
        with self._changed:
            self._append(*pickle.loads(data))

    # --- turns ------------------------------------------------------------------------------------

    @property
    def _end(self) -> int:
        return self._first + len(self._log)

    def _yield_turn(self, rank: int) -> None:
        """Let other ranks run until this one gets the turn back."""
        state = ProcessState.now()
        self._next_turn(rank)
        self._await_turn(rank)
        state.restore()

    def _next_turn(self, rank: int) -> None:
        others = [(rank + i) % self.size for i in range(1, self.size + 1)]
        hosted = [other for other in others if other in self._seats]
        # Without one that still has to arrive, any may complete the collective.
        self._turn = next(
            (r for r in hosted if r not in self._calls), hosted[0] if hosted else None
        )
        if self._turn is not None:
            self._seats[self._turn].turn.notify()

    def _await_turn(self, rank: int) -> None:
        turn = self._seats[rank].turn
        turn.wait_for(lambda: self._turn == rank or self.error is not None)

    # --- meeting the other processes --------------------------------------------------------------

    def _complete(self) -> None:
        """Do the collective in which all ranks of this process are, or wait for a change.

        A change is another group, a new rank here, or the result from another process.
        """
        group, calls = self._group, dict(self._calls)
        if group is None:
            self._changed.wait()
            return
        self.is_meeting = True
        self._changed.release()
        result = None
        try:
            result = _meet(group, calls, self.size)
        except (RuntimeError, TrainingError) as error:  # a process has gone
            group.close()
            self.lost = error
        finally:
            self._changed.acquire()
            self.is_meeting = False
            if result is not None:
                self._append(next(iter(calls.values())), result)
            elif self._group is group:
                self._group = None
            self._changed.notify_all()

    def _append(self, call: Call, result: Result) -> None:
        """Add the result of a collective, and forget those before the snapshot."""
        if call.phase == "start":
            self._start.append(result)
        elif call.phase == "epoch":
            self._epoch = [*(self._epoch if self._last.phase else ()), result]
        self._last = Call(call.name, phase=call.phase)
        if self.snapshot is not None and self.snapshot.number > self._first:
            del self._log[: self.snapshot.number - self._first]
            self._first = self.snapshot.number
        self._log.append(result)
        self._bytes += result.size
        self._calls.clear()
        self._changed.notify_all()

    def _copied(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state with copies of its tensors, into the memory of the last copies."""
        tensors: list[torch.Tensor] = []
        map_tensors(state, tensors.append)
        same = len(tensors) == len(self._buffers) and all(
            new.shape == old.shape and new.dtype == old.dtype
            for new, old in zip(tensors, self._buffers, strict=True)
        )
        with torch.no_grad():
            if same:
                torch._foreach_copy_(self._buffers, tensors)
            else:
                self._buffers = [tensor.detach().clone() for tensor in tensors]
        copies = iter(self._buffers)
        copied: dict[str, Any] = map_tensors(state, lambda _: next(copies))
        return copied


def _apart(first: int, name: str, rank: int, other: str) -> str:
    return (
        f"rank {first} is in {name}, and rank {rank} in {other}: processes would deadlock. "
        "Fix: call the same collectives in the same order on all ranks, and give modules the same "
        "parameters"
    )


def _again(prelude: Iterator[Result], rank: int, name: str) -> Result:
    """Return the result of a collective that the rank has called before, when it began."""
    for result in prelude:
        if result.name == name:
            return result
    raise TrainingError(
        f"rank {rank} cannot be taken over: as it starts again it calls {name}, which ranks have "
        "not called when they began. Fix: call the same collectives whenever a run or epoch begins"
    )


def _meet(group: Group, calls: dict[int, Call], size: int) -> Result:
    """Do one collective with the other processes."""
    local = []
    for rank, call in sorted(calls.items()):
        found = call.gradients
        described = None if found is None else (found.present, found.digest)
        local.append((rank, call.name, call.data, described))
    rows = [row for each in group.gather(pickle.dumps(local)) for row in pickle.loads(each)]
    rows.sort()
    first = rows[0][1]
    for rank, name, _, _ in rows:
        if name != first:
            return Result(first, [], problem=_apart(0, first, rank, name))
    data = [row[2] for row in rows]
    if rows[0][3] is None:
        return Result(first, data)
    masks, digests = zip(*(row[3] for row in rows), strict=True)
    present = bytes(map(any, zip(*masks, strict=True)))
    flats = [call.gradients.flats(present) for _, call in sorted(calls.items()) if call.gradients]
    means = []
    for alike in zip(*flats, strict=True):
        leaves = [flat.div_(size) for _, flat in alike]  # as DDP: a sum may overflow in 16 bits
        means.append((alike[0][0], group.sum(leaves)))
    return Result(first, data, means, list(digests))
