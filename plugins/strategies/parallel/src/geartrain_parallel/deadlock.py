"""End a run whose ranks wait for each other in different collectives.

Collectives of FSDP, DTensor and DeepSpeed meet no header. A thread of each rank looks whether the
training thread still waits in the collective of the last look. If it does for some seconds, the
thread puts the collective into the run's store. Ranks that wait for each other in a circle cannot
continue: they end with an error that has the collective and the line of each.

The collectives are those of torch's Flight Recorder, which records them anyway:
https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from geartrain import TrainingError
from geartrain_parallel import headers
from geartrain_parallel.collective_order import APART
from geartrain_parallel.failures import is_connection
from geartrain_parallel.patience import Patience
from geartrain_parallel.reports import disconnect_if_failed, report

if TYPE_CHECKING:
    from types import FrameType

    from torch._C._distributed_c10d import Store

    from geartrain import Run

#: Seconds between two looks, and the looks after which a rank that stands still waits.
_PERIOD, _LOOKS = 1.0, 4
#: The most seconds for which ranks that have found a deadlock wait until all have found it.
_TOGETHER = 3.0
#: The modules in whose functions a thread waits for other ranks.
_WAITING = ("torch.distributed", "torch.autograd.graph", "geartrain_parallel", "deepspeed.comm")
#: Those of an operation of torch, such as ``wait_tensor``.
_OPERATION = ("torch._ops", "torch._library")


@dataclass(frozen=True, slots=True)
class Wait:
    """The collective in which a rank waits."""

    #: The name of its process group, and the ranks of this group.
    group: str
    members: Sequence[int]
    #: The number of the collective in its group, and what it exchanges.
    number: int
    call: str
    #: The name to show, with the line of the user's code.
    place: str
    #: Group -> the number of the last collective that this rank has begun.
    begun: Mapping[str, int]


def deadlocked(waits: Mapping[int, Wait]) -> list[int]:
    """Return the ranks that wait for each other in a circle, or for a rank that does.

    Args:
        waits: by rank, without the ranks that do not wait.
    """
    stuck = set(waits)
    while True:
        still = {rank for rank in stuck if not stuck.isdisjoint(_awaited(rank, waits))}
        if still == stuck:
            return sorted(stuck)
        stuck = still


def _awaited(rank: int, waits: Mapping[int, Wait]) -> Iterator[int]:
    """Yield the waiting ranks that are not in the collective of this rank, and did not pass it."""
    wait = waits[rank]
    for other in wait.members:
        if other == rank or other not in waits:
            continue
        there, begun = waits[other], waits[other].begun.get(wait.group, 0)
        is_in_it = there.group == wait.group and there.number == wait.number
        if begun < wait.number or (is_in_it and there.call != wait.call):
            yield other


class Watch:
    """Watches the collectives of this rank, in a thread.

    Args:
        run: of this rank, whose process group exists. The caller is the training thread.
    """

    def __init__(self, run: Run) -> None:
        #: The error with which this rank ends, if ranks wait for each other.
        self.error: TrainingError | None = None
        self._rank, self._size = run.world.rank, run.world.size
        # A store answers one call at a time, and the training thread may wait in one.
        self._store: Store | None = None if run.store is None else run.store.clone()  # type: ignore[attr-defined]
        self._trains, self._over = threading.current_thread(), threading.Event()
        self._grace = Patience.from_environment().grace
        self._dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
        if self._store is not None and self._dump is not None:
            threading.Thread(target=self._look, name="geartrain-deadlock", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def explain(self, error: BaseException) -> None:
        """Find the error of a rank in another collective, which has closed the connection."""
        if self.error is None and self._store is not None and is_connection(str(error)):
            with suppress(RuntimeError):
                if self._store.check([APART]):
                    self.error = TrainingError(self._store.get(APART).decode())

    def _look(self) -> None:
        seen, looks, told = None, 0, False
        before: dict[int, Wait] = {}
        with suppress(RuntimeError):  # rank 0, which serves the store, has gone
            while not self._over.wait(_PERIOD):
                frame = sys._current_frames().get(self._trains.ident or 0)
                # A frame object may be that of another call, which has the same address.
                spot = None if frame is None else (id(frame), frame.f_lasti)
                waits = spot == seen and _is_waiting(frame)
                seen, looks = spot, looks + 1 if waits else 0
                wait = self._wait(frame) if looks >= _LOOKS else None
                if wait is None and not told:
                    continue
                told = wait is not None
                self._tell(f"waits/{self._rank}", json.dumps(asdict(wait)) if wait else "")
                waiting = self._waits() if told else {}
                # Twice, because a rank that has just continued may not have said so.
                if waiting and waiting == before and self._rank in deadlocked(waiting):
                    return self._end(waiting)
                before = waiting

    def _tell(self, key: str, value: str) -> None:
        assert self._store is not None
        self._store.set(key, value)

    def _waits(self) -> dict[int, Wait]:
        """Return the waits of the ranks that wait."""
        assert self._store is not None
        texts = {
            rank: self._store.get(key).decode()
            for rank in range(self._size)
            if self._store.check([key := f"waits/{rank}"])
        }
        return {rank: Wait(**json.loads(text)) for rank, text in texts.items() if text}

    def _wait(self, frame: FrameType | None) -> Wait | None:
        """Return the collective in which the training thread waits; ``None`` if in none."""
        assert self._dump is not None
        entries: list[Any] = pickle.loads(self._dump(True, False))["entries"]
        if not entries or entries[-1]["retired"]:
            return None
        last, begun = entries[-1], {}
        for entry in entries:
            begun[entry["process_group"][0]] = entry["collective_seq_id"]
        group, call = last["process_group"][0], last["profiling_name"].partition(":")[2]
        place = headers.present() or f"{call} of torch.distributed{headers.line(frame)}"
        return Wait(
            group,
            _members(group, self._size),
            last["collective_seq_id"],
            f"{call} {last['input_sizes']}",
            place,
            begun,
        )

    def _end(self, waits: Mapping[int, Wait]) -> None:
        places = [waits[rank].place if rank in waits else "" for rank in range(self._size)]
        self.error = headers.apart(places)
        report(self.error)  # before a rank disconnects, which the others would report
        self._tell(f"waits/ended/{self._rank}", "1")
        keys = [f"waits/ended/{rank}" for rank in deadlocked(waits)]
        for _ in range(int(_TOGETHER / 0.1)):
            assert self._store is not None
            if self._store.check(keys) or self._over.wait(0.1):
                break
        disconnect_if_failed()  # ends a wait in a collective
        if not self._over.wait(2 * self._grace):
            print(f"geartrain: {self.error}", file=sys.stderr, flush=True)
            os._exit(1)


def _members(group: str, size: int) -> list[int]:
    """Return the ranks of a process group."""
    for process_group in list(dist.distributed_c10d._world.pg_map):
        if process_group.group_name == group:
            return dist.get_process_group_ranks(process_group)
    return list(range(size))


def _is_waiting(frame: FrameType | None) -> bool:
    while frame is not None and _module(frame).startswith(_OPERATION):
        frame = frame.f_back
    return frame is not None and _module(frame).startswith(_WAITING)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))
