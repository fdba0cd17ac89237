"""Batches copied to the GPU ahead of the step that needs them, on a stream of their own, so that copies and steps run side by side.

Each ``next()`` goes: read, pin and copy the batch that lies ``prefetch`` ahead, on the side stream, which first waits for the work that
is queued for the GPU; make the compute stream wait for the copy that is due; give that batch. Nothing here makes the CPU wait for the
GPU, except a copy from memory that is not pinned, and an object whose ``.to(device)`` waits.

Why the memory is safe without ``record_stream``, whatever a batch is made of: copies are allocated from the side stream's pool, to which
a batch's memory returns when its last reference goes, although steps that read it may still be queued. The pool gives it out again only
to allocations on the side stream, all of which happen here, each after the side stream was told to wait for every step queued until
then: before the new copy is written, whoever read the old one is done. Several iterators at once (validation inside an epoch) share the
stream and the rule. https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams

Why a loader may refill the memory that it gave: the next batch is read before the step of this one, so nothing of this one may still be
read from that memory then. Pageable memory has been read when the copy is queued. What the loader has pinned itself is copied once more,
by the CPU, see :meth:`Prefetcher.pin`. What is on this GPU already is not copied at all: nothing is read ahead of it, see :func:`stays`.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from geartrain import Run
from geartrain.plugin_api import Through, map_nested, map_tensors, move, overridden

#: What errors say of pinned memory that the system does not give: cudaErrorMemoryAllocation, cudaErrorOperatingSystem (locking was
#: refused), and torch's CPU allocator. https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html
_NO_MEMORY = ("out of memory", "OS call failed", "can't allocate memory", "not enough memory")


class Prefetcher:
    """Gives batches on one GPU, for a whole run.

    Args:
        device: where batches go.
        prefetch: how many batches are copied ahead; with 0 each is copied when it is due, on the stream that the step uses.
        pins: whether to copy what lies in pageable memory to pinned memory first; a copy from pageable memory makes the CPU wait until
            the GPU has done everything before it.
    """

    def __init__(self, device: torch.device, prefetch: int, pins: bool) -> None:
        self.device, self.prefetch, self._pins = device, prefetch, pins
        if prefetch:
            # One for the whole run: each stream has a memory pool of its own, which keeps what it once took.
            self.side: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def batches(self, run: Run, loader: Iterable[Any], stage: str) -> Iterator[Any]:
        """What the hook ``device_batches`` returns."""
        if overridden(run.module, "transfer_batch_to_device"):
            # It may do anything with the batch and the GPU: nothing of it may come early.
            return Through(iter(loader), loader, run.to_device)
        index = 0 if stage == "train" else run.dataloader_idx
        if self.prefetch:
            return Ahead(self, run, loader, index, most(run, stage, index))
        module, fresh = run.module, pins_anew(loader)

        def when_due(batch: Any) -> Any:
            source = self.pin(module.on_before_batch_transfer(batch, index), fresh)
            return module.on_after_batch_transfer(move(source, self.device), index)

        return Through(iter(loader), loader, when_due)

    def pin(self, data: Any, fresh: bool) -> Any:
        """The batch in pinned memory, as far as it can be. A tensor's pinned memory is reused only after copies from it are done: torch
        watches those.

        Args:
            fresh: whether what is pinned already may be used as it is. A loader that fills the same pinned memory again would overwrite it
                before the GPU has copied it: torch cannot watch that.

        Raises:
            RuntimeError: it cannot be pinned, for another reason than a lack of such memory.
        """
        if self._pins:
            try:
                return pinned(data, fresh)
            except RuntimeError as error:
                if not any(words in str(error) for words in _NO_MEMORY):
                    raise
                self._pins = False
                warnings.warn(
                    f"batches cannot be pinned, so the CPU waits for each copy to the GPU: {str(error).splitlines()[0]}. "
                    "Fix: more locked memory (ulimit -l, a container's limits), or --accelerator.pin_memory false",
                    stacklevel=2,
                )
        return (
            data
            if fresh
            else map_tensors(data, lambda tensor: tensor.clone() if tensor.is_pinned() else tensor)
        )


@dataclass(slots=True)
class _Copy:
    """A batch on its way."""

    #: The batch as it was. Kept until the compute stream waits for the copy: memory of the GPU in it belongs to the compute stream's
    #: pool, which may give it out again from then on only.
    source: Any
    batch: Any
    #: Recorded on the side stream after the copy.
    done: torch.cuda.Event


class Ahead:
    """One pass over a loader.

    Args:
        index: the loader's, for the module's transfer hooks.
        most: batches that will be asked for; no more are read, because a generator of the user's own goes on in the next epoch.
    """

    def __init__(
        self, prefetcher: Prefetcher, run: Run, loader: Iterable[Any], index: int, most: int | None
    ) -> None:
        self._prefetcher, self._module, self._index, self._left = (
            prefetcher,
            run.module,
            index,
            most,
        )
        self._iterator: Iterator[Any] | None = iter(loader)
        self._ahead, self._fresh = prefetcher.prefetch, pins_anew(loader)
        self._copies: deque[_Copy] = deque()
        self._failure: Exception | None = None

    def __iter__(self) -> Ahead:
        return self

    def __next__(self) -> Any:
        compute = torch.cuda.current_stream(self._prefetcher.device)
        while self._iterator is not None and len(self._copies) <= self._ahead:
            try:
                self._read_one(compute)
            except Exception as error:  # the batches before it are still to be given: it surfaces where the plain loop has it
                self._failure, self._iterator = error, None
        if self._copies:
            return self._due(compute)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        raise StopIteration

    def close(self) -> None:
        """Let go of what was read ahead. Its copies may still run: their memory goes back to the side stream's pool, where the next copy
        comes after them in the stream's own order, so nothing has to be waited for."""
        self._iterator = self._failure = None
        self._copies.clear()

    def _read_one(self, compute: torch.cuda.Stream) -> None:
        """Queue the copy of the next batch, if there is one; the CPU goes on at once where its memory is pinned."""
        assert self._iterator is not None
        if self._left == 0:
            self._iterator = None
            return
        try:
            # On the compute stream, as everything of the user's. What a loader does on the GPU for this batch is queued before the steps
            # of those ahead of it, which is why a batch that the copy leaves where it is ends reading ahead.
            source = next(self._iterator)
        except StopIteration:
            self._iterator = None
            return
        self._left = None if self._left is None else self._left - 1
        source = self._prefetcher.pin(
            self._module.on_before_batch_transfer(source, self._index), self._fresh
        )
        side = self._prefetcher.side
        # The copy starts when everything queued so far is done, which is what makes its memory safe to write, see above, and a source
        # on the GPU safe to read. The step that comes next is queued after this: the copy runs beside it.
        side.wait_stream(compute)
        with torch.cuda.stream(side):
            batch = move(source, self._prefetcher.device)
            self._copies.append(_Copy(source, batch, side.record_event()))
        if stays(source, batch):
            self._ahead = (
                0  # its step is queued before the loader goes on, here and with all batches to come
            )

    def _due(self, compute: torch.cuda.Stream) -> Any:
        """The oldest copy; nothing here keeps it, so that its memory is free for another copy as soon as the loop has let it go."""
        due = self._copies.popleft()
        # The GPU's compute stream waits here, not the CPU; with a prefetch of 1 the copy ran beside the step before.
        compute.wait_event(due.done)
        # When the batch is due and on the compute stream: this may read buffers that training changes.
        return self._module.on_after_batch_transfer(due.batch, self._index)


def pins_anew(loader: Iterable[Any]) -> bool:
    """Whether what a loader pins is not filled again while it is in use: torch's own takes new pinned memory for each batch."""
    return isinstance(loader, DataLoader) and loader.pin_memory


def pinned(data: Any, fresh: bool = True) -> Any:
    """``data`` with every strided CPU tensor, and everything else that has ``pin_memory()``, in pinned memory. What cannot be pinned
    (its ``pin_memory()`` is not implemented) stays as it is.

    Args:
        fresh: whether a tensor that is pinned already stays as it is; else it is copied to other pinned memory, by the CPU.

    Raises:
        RuntimeError: the system gives no more such memory.
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


def stays(source: Any, batch: Any) -> bool:
    """Whether anything of ``source`` is in ``batch``, what the copy made of it: a tensor that was on the device, or an object that gives
    itself. A loader that refills it would change a batch whose step is still to come."""
    given: list[Any] = []
    made: list[Any] = []
    _gather(source, given)
    _gather(batch, made)
    before = set(map(id, given))
    return any(id(part) in before for part in made)


def _gather(item: Any, found: list[Any]) -> Any:
    """Put a batch's tensors, and its objects that move themselves, with the tensors that those hold, into ``found``. Gives the item.

    No function within a function, which would refer to itself: the batch's memory would then wait for Python's garbage collector."""
    if isinstance(item, torch.Tensor):
        found.append(item)
    elif callable(getattr(item, "to", None)):
        found.append(item)
        found.extend(
            value
            for value in getattr(item, "__dict__", {}).values()
            if isinstance(value, torch.Tensor)
        )
    else:
        map_nested(item, lambda part: _gather(part, found))
    return item


def most(run: Run, stage: str, index: int) -> int | None:
    """How many batches of a loader the loop will ask for, at most; ``None`` if it cannot be known."""
    options, count = run.plan.options, run.stages[stage].batches[index]
    if stage == "train":
        left = (
            None
            if options.max_steps == -1
            else (options.max_steps - run.step) * options.accumulate_grad_batches
        )
        return min((number for number in (count, left) if number is not None), default=None)
    if run.stage == "sanity_check" and options.num_sanity_val_steps != -1:
        count = (
            options.num_sanity_val_steps
            if count is None
            else min(count, options.num_sanity_val_steps)
        )
    return (
        None if count is None else max(count, 1)
    )  # a rank without batches of its own reads one, to repeat it
