"""Copy batches to the GPU before the step that needs them, on a side stream, in parallel to steps.

Each ``next()`` does the following:

1. Read, pin and copy the batch that is ``prefetch`` batches ahead, on the side stream. This stream
   first waits for the work that is queued for the GPU.
2. Make the compute stream wait for the copy of the next batch.
3. Return that batch.

The CPU waits for the GPU only for a copy from memory that is not pinned, and for an object whose
``.to(device)`` waits.

Why the memory is safe without ``record_stream``, for batches of any type: copies are allocated from
the side stream's pool. The memory returns to this pool when the last reference to the batch is
dropped, although steps that read it may still be queued. The pool reuses it only for allocations on
the side stream. All of them happen here, each after the side stream waits for every queued step. So
before a new copy is written, all readers of the old copy are done. Several iterators at the same
time (validation inside an epoch) share the stream and this rule.
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams

Why a loader may reuse the memory of a batch: the next batch is read before the step of this one, so
all reads from this batch's memory must be done by then. Pageable memory has been read when the copy
is queued. Memory that the loader has pinned itself is copied once more, by the CPU, see
:meth:`Prefetcher.pin`. A batch that is on this GPU already is not copied; no batch is read ahead of
it, see :func:`stays`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from geartrain import Run
from geartrain.plugin_api import MappedBatches, map_nested, map_tensors, move, overridden, warn

#: Texts of errors if the system has no more pinned memory: cudaErrorMemoryAllocation,
#: cudaErrorOperatingSystem (locking was refused), and torch's CPU allocator.
#: https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html
_NO_MEMORY = ("out of memory", "OS call failed", "can't allocate memory", "not enough memory")


class Prefetcher:
    """Copies batches to one GPU, for a whole run.

    Args:
        device: the GPU.
        prefetch: number of batches that are copied ahead. With 0, each batch is copied when its
            step starts, on the stream of the step.
        pins: if True, copy batches from pageable to pinned memory first. A copy from pageable
            memory makes the CPU wait until the GPU has done all earlier work.
    """

    def __init__(self, device: torch.device, prefetch: int, pins: bool) -> None:
        self.device, self.prefetch, self._pins = device, prefetch, pins
        if prefetch:
            # One for the whole run: each stream has its own memory pool, which keeps its memory.
            self.side: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            #: Recorded again for each copy: a stream that waits for an event waits for the work
            #: recorded when it was told to. A new event would cost as much as the copy of a small
            #: batch.
            self.queued: torch.cuda.Event = new_event()

    def batches(self, run: Run, loader: Iterable[Any], stage: str) -> Iterator[Any]:
        """Return the batches of a loader on the GPU, for the hook ``device_batches``."""
        if overridden(run.module, "transfer_batch_to_device"):
            # It may do anything with the batch and the GPU, so it must not run early.
            return MappedBatches(iter(loader), loader, run.to_device)
        index = 0 if stage == "train" else run.dataloader_idx
        # The state of a loader that resumes itself must be that after the batch of the step.
        if self.prefetch and not hasattr(loader, "load_state_dict"):
            return Ahead(self, run, loader, index, most(run, stage, index))
        module, fresh = run.module, pins_new_memory(loader)

        def when_due(batch: Any) -> Any:
            batch = module.on_before_batch_transfer(batch, index)
            if not on_device(batch, self.device):
                batch = move(self.pin(batch, fresh), self.device)
            return module.on_after_batch_transfer(batch, index)

        return MappedBatches(iter(loader), loader, when_due)

    def pin(self, data: Any, fresh: bool) -> Any:
        """Return the batch in pinned memory, as far as it can be pinned.

        torch reuses a tensor's pinned memory only after all copies from it are done.

        Args:
            data: the batch.
            fresh: if True, use tensors that are pinned already. If False, copy them: a loader that
                fills the same pinned memory again could overwrite it before the GPU has copied it,
                and torch cannot prevent that.

        Raises:
            RuntimeError: the batch cannot be pinned, for another reason than a lack of memory.
        """
        if self._pins:
            try:
                return pinned(data, fresh)
            except RuntimeError as error:
                if not any(words in str(error) for words in _NO_MEMORY):
                    raise
                self._pins = False
                warn(
                    "batches cannot be pinned, so the CPU waits for each copy to the GPU: "
                    f"{str(error).splitlines()[0]}. Fix: allow more locked memory (ulimit -l, a "
                    "container's limits), or --accelerator.pin_memory false"
                )
        if fresh:
            return data
        return map_tensors(data, lambda tensor: tensor.clone() if tensor.is_pinned() else tensor)


@dataclass(slots=True)
class _Copy:
    """A batch that is being copied."""

    #: The batch before the copy. Kept until the compute stream waits for the copy: its memory on
    #: the GPU belongs to the compute stream's pool, which may reuse it only after that.
    source: Any
    batch: Any
    #: Recorded on the side stream after the copy. ``None`` for a batch that was not copied.
    done: torch.cuda.Event | None


class Ahead:
    """One pass over a loader, with batches copied ahead.

    Args:
        prefetcher: the run's prefetcher.
        run: the run.
        loader: the loader.
        index: the loader's index, for the module's transfer hooks.
        most: number of batches that the loop will use. No more are read, because a user's generator
            continues in the next epoch.
    """

    def __init__(
        self, prefetcher: Prefetcher, run: Run, loader: Iterable[Any], index: int, most: int | None
    ) -> None:
        self._prefetcher, self._module = prefetcher, run.module
        self._index, self._left = index, most
        self._iterator: Iterator[Any] | None = iter(loader)
        self._ahead, self._fresh = prefetcher.prefetch, pins_new_memory(loader)
        self._copies: deque[_Copy] = deque()
        self._events: list[torch.cuda.Event] = []  # of copies that are done
        self._failure: Exception | None = None

    def __iter__(self) -> Ahead:
        return self

    def __next__(self) -> Any:
        while self._iterator is not None and len(self._copies) <= self._ahead:
            try:
                self._read_one()
            except Exception as error:  # raised after the earlier batches, as without prefetch
                self._failure, self._iterator = error, None
        if self._copies:
            return self._due()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        raise StopIteration

    def close(self) -> None:
        """Drop the batches that were read ahead.

        Their copies may still run. This needs no wait: the memory returns to the side stream's
        pool, and the next copy on that stream starts after them.
        """
        self._iterator = self._failure = None
        self._copies.clear()

    def _read_one(self) -> None:
        """Queue the copy of the next batch, if any. The CPU does not wait for pinned memory."""
        assert self._iterator is not None
        if self._left == 0:
            self._iterator = None
            return
        try:
            # On the compute stream, as all of the user's code. The loader's GPU work for this batch
            # is queued before the steps of earlier batches. This is why reading ahead ends with a
            # batch that is on the GPU already.
            source = next(self._iterator)
        except StopIteration:
            self._iterator = None
            return
        self._left = None if self._left is None else self._left - 1
        source = self._module.on_before_batch_transfer(source, self._index)
        device, side = self._prefetcher.device, self._prefetcher.side
        if on_device(source, device):
            self._copies.append(_Copy(source, source, None))
            # From now on, each step is queued before the loader continues.
            self._ahead = 0
            return
        source = self._prefetcher.pin(source, self._fresh)
        done = self._events.pop() if self._events else new_event()
        # The copy starts when all queued work is done. This makes its memory safe to write (see the
        # module's docstring), and a source on the GPU safe to read. The next step is queued after
        # this, so the copy runs in parallel to it.
        self._prefetcher.queued.record(torch.cuda.current_stream(device))
        side.wait_event(self._prefetcher.queued)
        with torch.cuda.stream(side):
            batch = move(source, device)
            done.record(side)
        self._copies.append(_Copy(source, batch, done))
        if stays(source, batch):
            self._ahead = 0

    def _due(self) -> Any:
        """Return the oldest copy. Keep no reference to it, so that the loop can free its memory."""
        due = self._copies.popleft()
        # The compute stream waits here, not the CPU. With prefetch=1 the copy ran in parallel to
        # the previous step.
        if due.done is not None:
            torch.cuda.current_stream(self._prefetcher.device).wait_event(due.done)
            self._events.append(due.done)
        # Only now, and on the compute stream: this hook may read buffers that training changes.
        return self._module.on_after_batch_transfer(due.batch, self._index)


def new_event() -> torch.cuda.Event:
    """Return an event that streams can wait for."""
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def pins_new_memory(loader: Iterable[Any]) -> bool:
    """True if a loader uses new pinned memory for each batch, as torch's loader does."""
    return isinstance(loader, DataLoader) and loader.pin_memory


def pinned(data: Any, fresh: bool = True) -> Any:
    """Copy a batch's strided CPU tensors and objects with ``pin_memory()`` to pinned memory.

    Parts whose ``pin_memory()`` raises ``NotImplementedError`` do not change.

    Args:
        data: the batch.
        fresh: if True, a tensor that is pinned already is not copied. If False, the CPU copies it
            to other pinned memory.

    Returns:
        The batch with these copies.

    Raises:
        RuntimeError: the system has no more pinned memory.
    """
    try:
        if isinstance(data, torch.Tensor):
            if data.device.type != "cpu" or data.layout is not torch.strided:
                return data
            if not data.is_pinned():
                return data.pin_memory()
            return data if fresh else torch.empty_like(data, pin_memory=True).copy_(data)
        if callable(getattr(data, "pin_memory", None)):
            return data.pin_memory()
    except NotImplementedError:
        return data
    return map_nested(data, lambda item: pinned(item, fresh))


def on_device(batch: Any, device: torch.device) -> bool:
    """True if a batch is a tensor on ``device``, or a list or tuple of nothing but such tensors.

    It needs neither a copy nor a stream. (For other forms, copying finds the same at more cost.)
    """
    parts = batch if type(batch) in (list, tuple) else (batch,)
    return all(type(part) is torch.Tensor and part.device == device for part in parts)


def stays(source: Any, batch: Any) -> bool:
    """True if the copy ``batch`` shares a tensor or an object with ``source``.

    A tensor may be on the device already, or an object's ``to`` may return the object itself. If
    the loader changes it later, it would change a batch whose step has not run yet.
    """
    given: list[Any] = []
    made: list[Any] = []
    _gather(source, given)
    _gather(batch, made)
    before = set(map(id, given))
    return any(id(part) in before for part in made)


def _gather(item: Any, found: list[Any]) -> Any:
    """Append a batch's tensors, objects with ``to``, and these objects' tensors to ``found``.

    This is no nested function, which would refer to itself: then only Python's garbage collector
    would free the batch's memory.

    Returns:
        The item.
    """
    if isinstance(item, torch.Tensor):
        found.append(item)
    elif callable(getattr(item, "to", None)):
        found.append(item)
        values = getattr(item, "__dict__", {}).values()
        found.extend(value for value in values if isinstance(value, torch.Tensor))
    else:
        map_nested(item, lambda part: _gather(part, found))
    return item


def most(run: Run, stage: str, index: int) -> int | None:
    """Return the maximum number of batches that the loop reads from a loader, if it is known."""
    options, count = run.plan.options, run.stages[stage].batches[index]
    if stage == "train":
        remaining = None
        if options.max_steps != -1:
            remaining = (options.max_steps - run.step) * options.accumulate_grad_batches
        return min((number for number in (count, remaining) if number is not None), default=None)
    sanity = options.num_sanity_val_steps
    if run.stage == "sanity_check" and sanity != -1:
        count = sanity if count is None else min(count, sanity)
    # At least 1: a rank without its own batches reads one, to repeat it.
    return None if count is None else max(count, 1)
