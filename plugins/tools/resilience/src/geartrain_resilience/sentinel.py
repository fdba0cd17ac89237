"""``sentinel``: find out why the ranks of a run wait, and end the run."""

from __future__ import annotations

import faulthandler
import io
import json
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from geartrain import Run, TrainingError, UsageError, World, hookimpl
from geartrain.plugin_api import is_of_user
from geartrain_parallel import Patience, is_connection, report
from geartrain_parallel.reports import disconnect_if_failed
from geartrain_resilience.exchange import Attempt

if TYPE_CHECKING:
    from types import FrameType

    from torch._C._distributed_c10d import Store

_LABEL = "geartrain-resilience[sentinel]"
#: Keys of the run's store: a rank asks all for their place; the place of each; each has read them.
_ASKED, _PLACES, _READ = "sentinel/asked", "sentinel/place", "sentinel/read"
#: The most seconds between two looks; and the seconds that a rank has to answer, also after an
#: error, when the other may have gone.
_PERIOD, _ANSWER, _ANSWER_TO_ERROR = 1.0, 5.0, 1.0
#: The number of a rank's last collectives that are compared.
_COMPARED = 50
#: Collectives to which the ranks pass tensors of different shapes.
_UNEQUAL = ("gather", "scatter")
#: Packages whose lines are not the user's, beside the standard library.
_PACKAGES = ("geartrain", "pluggy", "torch")
#: The modules in whose functions a rank waits for others; the outermost function is the collective.
_WAITING = (
    "torch.distributed",
    "geartrain_parallel.headers",
    "geartrain_parallel.collectives",
    "geartrain_bagua",
)
#: The number of printed frames of a stack.
_FRAMES = 16


@dataclass(frozen=True, slots=True)
class Place:
    """Where the program of a rank is."""

    rank: int
    #: The number of events of the run so far. Ranks that train together have the same.
    events: int
    #: The last event.
    event: str
    #: The collective in which the rank waits for others; empty if it is in none.
    collective: str
    #: The innermost line of the user's code.
    line: str
    stack: str
    #: The last collectives of torch.distributed: the number of each -> what it is, and its line.
    collectives: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, rank: int, events: int, event: str, frame: FrameType | None) -> Place:
        """Return the place of a thread of this rank whose innermost frame is ``frame``."""
        stack = "".join(traceback.format_stack(frame)[-_FRAMES:])
        return cls(rank, events, event, _collective(frame), _line(frame), stack, recorded())

    def __str__(self) -> str:
        within = f"waits in {self.collective}" if self.collective else "is in no collective"
        return f"rank {self.rank} {within}{self.line}, after {self.event}"


class Sentinel:
    """End a run that stands still, and name the late rank, its line and its collective.

    Each rank counts the events of the run. If none comes for ``seconds``, a thread of each rank
    sends the stack of the training thread, and the last collectives, through the run's store. The
    ranks that wait for a late one end with an error. If a collective fails before, the ranks
    compare their last collectives, too.

    The collectives are those of torch's Flight Recorder:
    https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html

    Args:
        seconds: without a batch or a step, from the first batch on.

    Raises:
        UsageError: ``seconds`` is not above 0.
    """

    def __init__(self, seconds: float = 300.0) -> None:
        if not 0 < seconds <= threading.TIMEOUT_MAX:
            raise UsageError(f"{_LABEL}: seconds={seconds!r} must be above 0. Fix: seconds=300")
        self.seconds = seconds
        #: The events of this rank's run, and the last one.
        self.events, self.event = 0, "the start"
        #: The error with which this process ends its run.
        self.error: TrainingError | None = None
        self._watch: _Watch | None = None

    # --- progress ---------------------------------------------------------------------------------

    def _note(self, run: Run, name: str) -> None:
        self.events += 1
        self.event = f"{name}, {run.step} steps done"

    @hookimpl
    def on_train_batch_start(self, run: Run) -> None:
        self._note(run, "on_train_batch_start")

    @hookimpl
    def on_before_backward(self, run: Run) -> None:
        self._note(run, "on_before_backward")

    @hookimpl
    def on_after_backward(self, run: Run) -> None:
        self._note(run, "on_after_backward")

    @hookimpl
    def on_step_end(self, run: Run) -> None:
        self._note(run, "on_step_end")

    @hookimpl
    def on_validation_batch_start(self, run: Run) -> None:
        self._note(run, "on_validation_batch_start")

    @hookimpl
    def on_validation_end(self, run: Run) -> None:
        self._note(run, "on_validation_end")

    @hookimpl
    def on_checkpoint_saved(self, run: Run) -> None:
        self._note(run, "on_checkpoint_saved")

    @hookimpl
    def on_epoch_end(self, run: Run) -> None:
        self._note(run, "on_epoch_end")

    # --- the run ----------------------------------------------------------------------------------

    @hookimpl(wrapper=True)
    def launch(self) -> Generator[None, Any, Any]:
        try:
            return (yield)
        except BaseException as error:
            for note in getattr(error, "__notes__", ()):
                if note.startswith(_LABEL):  # on this rank or another
                    raise TrainingError(note) from None
            raise

    @hookimpl(wrapper=True)
    def setup_process_group(self, run: Run) -> Generator[None, World, World]:
        # gloo aborts the process if the ranks' tensors differ in size: show the line.
        if not faulthandler.is_enabled():
            with suppress(io.UnsupportedOperation, RuntimeError):  # stderr is no file
                faulthandler.enable()
        world = yield
        self.events, self.event, self.error = 0, "the start", None
        self._watch = _Watch(self, run, world)
        threading.Thread(target=self._watch.run, name="geartrain-sentinel", daemon=True).start()
        return world

    @hookimpl
    def on_exception(self, run: Run, error: BaseException) -> None:
        if self._watch is None:
            return
        self._watch.stop()
        if self.error is not None:
            error.add_note(str(self.error))  # it is only the lost connection, or an interrupt
        elif is_connection(str(error)):
            self._watch.explain()

    @hookimpl(wrapper=True)
    def teardown_process_group(self) -> Generator[None, None, None]:
        if self._watch is not None:
            self._watch.stop()
        self._watch = None
        yield


class _Watch:
    """Watches one run of this rank, in a thread.

    Args:
        sentinel: counts the events.
        run: of this rank.
        world: of the run.
    """

    def __init__(self, sentinel: Sentinel, run: Run, world: World) -> None:
        self._sentinel, self._rank, self._size = sentinel, world.rank, world.size
        #: Set when the run is over.
        self._over = threading.Event()
        # A store answers one call at a time, and the training thread may wait in one.
        self._store: Store | None = None if run.store is None else run.store.clone()  # type: ignore[attr-defined]
        self._thread = threading.current_thread()
        self._patience = Patience.from_environment()

    def run(self) -> None:
        if self._until_stalled():
            self._tell(_ASKED, "1")
            self._end(self._places(_ANSWER))

    def stop(self) -> None:
        self._over.set()

    def explain(self) -> None:
        """Print the first collective in which the ranks differ, after a collective has failed."""
        if difference := differing(self._places(_ANSWER_TO_ERROR)):
            print(f"geartrain: {_LABEL}: {difference}", file=sys.stderr, flush=True)

    def _until_stalled(self) -> bool:
        """Wait until no event comes, on this rank or on another; return False if the run ended.

        Only time in which this process runs counts: a user may suspend it.
        """
        period = min(_PERIOD, self._sentinel.seconds / 4)
        events, waited, looked = 0, 0.0, time.monotonic()
        while not self._over.wait(period):
            passed, looked = min(time.monotonic() - looked, 2 * period), time.monotonic()
            # Before the first batch torch may import for seconds, and set-up has its own timeouts.
            same = 0 < events == self._sentinel.events
            waited = waited + passed if same else 0.0
            events = self._sentinel.events
            if waited >= self._sentinel.seconds:
                return True
            if self._has([_ASKED]):
                return True
        return False

    def _places(self, seconds: float) -> list[Place | None]:
        """Return the place of each rank; ``None`` if it does not answer in these seconds."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        local = Place.of(self._rank, self._sentinel.events, self._sentinel.event, frame)
        ranks = range(self._size)
        self._tell(f"{_PLACES}/{self._rank}", json.dumps(asdict(local)))
        self._wait([f"{_PLACES}/{rank}" for rank in ranks], seconds)
        places = [self._read(f"{_PLACES}/{rank}") for rank in ranks]
        places[self._rank] = local
        # A rank that has read them ends its run, and rank 0 with it the store.
        self._tell(f"{_READ}/{self._rank}", "1")
        self._wait([f"{_READ}/{rank}" for rank in ranks if places[rank]], _ANSWER_TO_ERROR)
        return places

    def _wait(self, keys: list[str], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._store is not None and not self._has(keys) and time.monotonic() < deadline:
            time.sleep(0.05)

    # A call of the store raises RuntimeError if rank 0, which serves it, has ended. This rank then
    # knows only of itself.

    def _tell(self, key: str, value: str) -> None:
        with suppress(RuntimeError):
            if self._store is not None:
                self._store.set(key, value)

    def _has(self, keys: list[str]) -> bool:
        with suppress(RuntimeError):
            return self._store is not None and self._store.check(keys)
        self._store = None
        return False

    def _read(self, key: str) -> Place | None:
        with suppress(RuntimeError):
            if self._store is not None and self._store.check([key]):
                return Place(**json.loads(self._store.get(key)))
        return None

    def _end(self, places: Sequence[Place | None]) -> None:
        late = late_ranks(places)
        error = TrainingError(verdict(places, late, self._sentinel.seconds))
        if self._rank == next(place.rank for place in places if place is not None):
            stacks = (f"{place}:\n{place.stack}" for place in places if place is not None)
            print(f"geartrain: {error}", *stacks, sep="\n", file=sys.stderr, flush=True)
        if self._rank in late and self._over.wait(self._patience.unwind):
            return  # the others have ended with the error, and their launcher has ended this rank
        self._sentinel.error = error
        report(error)
        disconnect_if_failed()  # ends a wait in a collective
        if self._over.wait(self._patience.grace) or self._thread is not threading.main_thread():
            return
        signal.pthread_kill(self._thread.ident or 0, signal.SIGINT)
        if not self._over.wait(self._patience.grace) and (self._size > 1 or Attempt.current()):
            os._exit(1)  # blocked in C, where Python cannot interrupt it


def late_ranks(places: Sequence[Place | None]) -> list[int]:
    """Return the ranks for which others wait; none if it is not known.

    Those that do not answer; else those in no collective; else those with the fewest events.
    """
    silent = [rank for rank, place in enumerate(places) if place is None]
    known = [place for place in places if place is not None]
    free = [place.rank for place in known if not place.collective]
    fewest = min(place.events for place in known)
    behind = [place.rank for place in known if place.events == fewest]
    for late in (silent, free, behind):
        if 0 < len(late) < len(places):
            return late
    return []


def verdict(places: Sequence[Place | None], late: Sequence[int], seconds: float) -> str:
    """Return the message of the error."""
    waited = f"{_LABEL}: no batch and no step for {seconds:g} s"
    named = [
        f"rank {rank} does not answer" if place is None else str(place)
        for rank, place in enumerate(places)
        if rank in late or not late
    ]
    cause = f"the others wait for {_ranks(late)}: " if late else ""
    difference = differing(places)
    return (
        f"{waited}; {cause}{'; '.join(named)}. {difference + '. ' if difference else ''}"
        "Fix: mend what it waits for, or give it more time with --sentinel.seconds"
    )


def differing(places: Sequence[Place | None]) -> str:
    """Return the first collective that is not the same on all ranks; empty if there is none."""
    known = [place for place in places if place is not None]
    shared = set.intersection(*(set(place.collectives) for place in known)) if known else set()
    for number in sorted(shared, key=lambda number: int(number.rpartition(" ")[2])):
        calls = {place.rank: place.collectives[number] for place in known}
        if len({call for call, _ in calls.values()}) > 1:
            listed = "; ".join(f"rank {rank}: {''.join(call)}" for rank, call in calls.items())
            return f"The ranks' collectives differ: {listed}"
    return ""


def recorded() -> dict[str, tuple[str, str]]:
    """Return the last collectives of this process; none if this torch does not record them."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
    if dump is None:
        return {}
    modules = {getattr(module, "__file__", None): name for name, module in [*sys.modules.items()]}
    found = {}
    for entry in pickle.loads(dump())["entries"][-_COMPARED:]:
        call = entry["profiling_name"].partition(":")[2]
        if call not in _UNEQUAL:
            call += "".join(f" {shape}" for shape in entry["input_sizes"])
        line = next(
            (
                f" ({os.path.basename(frame['filename'])}:{frame['line']})"
                for frame in entry["frames"]
                if _is_users(frame["filename"], modules)
            ),
            "",
        )
        found[f"{entry['pg_id']} {entry['collective_seq_id']}"] = (call, line)
    return found


def _is_users(file: str, modules: Mapping[str | None, str]) -> bool:
    package = modules.get(file, "<" if file.startswith("<") else "").partition(".")[0]
    return not package.startswith(("<", *_PACKAGES)) and package not in sys.stdlib_module_names


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _collective(frame: FrameType | None) -> str:
    """Return the collective in which a thread is; backward counts, where DDP reduces gradients."""
    collective = ""
    for inner in _frames(frame):
        module, name = str(inner.f_globals.get("__name__")), inner.f_code.co_name
        if module == "torch.autograd.graph":
            return "backward"
        if not module.startswith(_WAITING):
            return collective
        if name != "wrapper":
            collective = name
    return collective


def _line(frame: FrameType | None) -> str:
    for inner in _frames(frame):
        file = inner.f_code.co_filename
        if is_of_user(inner) and not file.startswith("<"):
            return f" ({os.path.basename(file)}:{inner.f_lineno})"
    return ""
