"""Let ranks agree on a collective before they enter it, and name the lines of ranks that do not.

Each collective of the hooks begins with an all-gather of a header of fixed size, which has the
collective's name, the line of the user's code, and the values if they are few. gloo ends the
process, which Python cannot catch, if ranks exchange different sizes.

Reductions of gradients have no header. A rank announces one in the run's store, which takes 2 µs.
A rank that waits for a header reads the announcements: a rank that began a later reduction before
this collective waits for this rank, too.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from geartrain import TrainingError
from geartrain_parallel import sealed

if TYPE_CHECKING:
    from types import FrameType

    from torch._C._distributed_c10d import Store

    from geartrain import Run

#: Bytes of a header; and of the content that fits beside the name and the line.
_SIZE, CONTENT = 1024, 600
#: The first and the longest pause between two looks at the announcements, in seconds.
_FIRST_PAUSE, _LONGEST_PAUSE = 2.0, 30.0
#: Packages whose frames are not the user's, beside the standard library.
_PACKAGES = ("geartrain", "pluggy", "torch", "deepspeed", "typing_extensions")


@dataclass(slots=True)
class _Progress:
    """The collectives that this rank has begun in a run."""

    store: Store | None
    reductions: int = 0
    headers: int = 0
    #: The collective whose header this rank meets now, or "".
    place: str = ""
    #: The process group of the headers; ``None`` for the default group.
    group: dist.ProcessGroup | None = None

    def announce(self, run: Run, name: str) -> None:
        if self.store is not None:
            # RuntimeError: rank 0 has gone, which the collective itself reports.
            with suppress(RuntimeError):
                self.store.set(
                    f"in/{run.world.rank}", f"{self.reductions} {self.headers} {name[:200]}"
                )

    def of_all(self, run: Run) -> list[tuple[int, int, str]]:
        """Return each rank's reductions, headers and last collective; empty if not known."""
        keys = [f"in/{rank}" for rank in range(run.world.size)]
        try:
            if self.store is None or not self.store.check(keys):
                return []
            texts = [value.decode() for value in self.store.multi_get(keys)]
        except RuntimeError:  # rank 0 has gone
            return []
        return [
            (int(reductions), int(headers), name)
            for reductions, headers, name in (text.split(" ", 2) for text in texts)
        ]


_progress = _Progress(None)


def _progress_of(run: Run) -> _Progress:
    global _progress
    if run.store is None:  # the strategy connects ranks in another way
        return _Progress(None)
    if _progress.store is not run.store:  # each run has a new store
        _progress = _Progress(run.store)
    return _progress


def separate(run: Run) -> None:
    """Give the headers a process group: gloo ends a process that meets another collective's size.

    Every rank calls it. ``join`` takes it back.
    """
    if dist.get_backend() == "gloo":
        _progress_of(run).group = dist.new_group()


def join() -> None:
    """Forget the process group of the headers, which nothing may keep after a run."""
    _progress.group = None


def present() -> str:
    """Return the collective whose header this rank meets now, or ""."""
    return _progress.place


def announce_reduction(run: Run) -> None:
    """Announce that this rank now reduces gradients with the others."""
    if run.world.size > 1:
        progress = _progress_of(run)
        progress.reductions += 1
        progress.announce(run, "the reduction of gradients")


def meet(run: Run, name: str, content: Any = None) -> list[Any]:
    """Wait until every rank is in this collective.

    Args:
        run: this rank's run.
        name: the collective's name, the same on every rank.
        content: what this rank sends; its pickle has at most ``CONTENT`` bytes.

    Returns:
        The content of each rank.

    Raises:
        TrainingError: a rank is in another collective, or does not come within the timeout.
    """
    progress, place = _progress_of(run), name + line(sys._getframe(1))
    progress.headers += 1
    progress.announce(run, place)
    data = pickle.dumps((name, place.encode()[-300:], content))
    sealed_data = sealed.seal(data.ljust(_SIZE - sealed.SIZE, b"\0"))
    header = torch.frombuffer(bytearray(sealed_data), dtype=torch.uint8)
    header = header.to(run.device)
    table = [torch.empty_like(header) for _ in range(run.world.size)]
    progress.place = place
    _wait(run, progress, place, dist.all_gather(table, header, progress.group, async_op=True))
    progress.place = ""
    rows = [row.cpu() for row in table]
    contents = [sealed.unseal(ctypes.string_at(row.data_ptr(), _SIZE)) for row in rows]
    ranks = list(map(pickle.loads, contents))
    if any(other != name for other, _, _ in ranks):
        raise apart([place.decode(errors="replace") for _, place, _ in ranks])
    return [content for _, _, content in ranks]


def _wait(run: Run, progress: _Progress, place: str, work: Any) -> None:
    if dist.get_backend() != "gloo":
        work.wait()
        return
    pause = _FIRST_PAUSE
    while True:
        try:
            work.wait(timedelta(seconds=pause))
            return
        except RuntimeError as error:
            if work.is_completed():  # with an error, or just after the pause
                _finish(run, progress, place, work)
                return
            others, pause = progress.of_all(run), min(2 * pause, _LONGEST_PAUSE)
            if any(
                reductions > progress.reductions and headers < progress.headers
                for reductions, headers, _ in others
            ):
                places = [name for _, _, name in others]
                places[run.world.rank] = place
                raise apart(places) from error


def _finish(run: Run, progress: _Progress, place: str, work: Any) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        late = [
            f"rank {rank} (last in {name})"
            for rank, (_, headers, name) in enumerate(progress.of_all(run))
            if headers < progress.headers
        ]
        waits = f"waited for {', '.join(late[:4])}" if late else "failed"
        raise TrainingError(f"{place} {waits}: {error}") from error


#: The action of an error of different collectives.
_SAME = "call the same collectives in the same order on every rank"


def apart(places: list[str], fix: str = _SAME) -> TrainingError:
    """Return the error of ranks that are in different collectives.

    Args:
        places: the collective of each rank, with its line; "" if it is not known.
        fix: the action.
    """
    ranks: dict[str, list[str]] = {}
    for rank, place in enumerate(places):
        if place:
            ranks.setdefault(place, []).append(str(rank))
    named = "; ".join(
        f"rank{'s' * (len(numbers) > 1)} {', '.join(numbers)} in {place}"
        for place, numbers in ranks.items()
    )
    return TrainingError(f"the ranks are in different collectives: {named}. Fix: {fix}")


def line(frame: FrameType | None) -> str:
    """Return the line of the user's code, and what it calls: ``" (all_gather, train.py:31)"``.

    Args:
        frame: the innermost.
    """
    called = ""
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package not in sys.stdlib_module_names and not package.startswith(_PACKAGES):
            file = os.path.basename(frame.f_code.co_filename)
            called = "" if called.startswith("_") else f"{called}, "  # not __call__ of a module
            return f" ({called}{file}:{frame.f_lineno})"
        called, frame = frame.f_code.co_name, frame.f_back
    return ""
