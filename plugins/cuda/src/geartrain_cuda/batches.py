"""Batches copied to the GPU ahead of the step that needs them, on a stream of their own, so that copies and steps run side by side.

Each ``next()`` goes: read, pin and copy the batch that lies ``prefetch`` ahead, on the side stream, which first waits for the work that
is queued for the GPU; make the compute stream wait for the copy that is due; give that batch. Nothing here makes the CPU wait for the
GPU, except a copy from memory that is not pinned, and an object whose ``.to(device)`` waits.

Why the memory is safe without ``record_stream``, whatever a batch is made of: copies are allocated from the side stream's pool, to which
a batch's memory returns when its last reference goes, although steps that read it may still be queued. The pool gives it out again only
to allocations on the side stream, all of which happen here, each after the side stream was told to wait for every step queued until
then: before the new copy is written, whoever read the old one is done. Several iterators at once (validation inside an epoch) share the
stream and the rule. https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from geartrain import Run
from geartrain.data import map_nested, move
from geartrain.module import overridden


class Prefetcher:
    """Gives batches on one GPU, for a whole run.

    Args:
        device: where batches go.
        prefetch: how many batches are copied ahead, at least 1.
        pins: whether to copy what lies in pageable memory to pinned memory first; a copy from pageable memory makes the CPU wait until
            the GPU has done everything before it.
    """

    def __init__(self, device: torch.device, prefetch: int, pins: bool) -> None:
        self.device, self.prefetch, self._pins = device, prefetch, pins
        # One for the whole run: each stream has a memory pool of its own, which keeps what it once took.
        self.side: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def batches(self, run: Run, loader: Iterable[Any], stage: str) -> Iterator[Any]:
        """What the hook ``device_batches`` returns."""
        if overridden(run.module, "transfer_batch_to_device"):
            return map(run.to_device, loader)  # it may do anything with the batch and the GPU: nothing of it may come early
        index = 0 if stage == "train" else run.dataloader_idx
        return Ahead(self, run, loader, index, most(run, stage, index))

    def pin(self, data: Any) -> Any:
        """The batch in pinned memory, as far as it can be. A tensor's pinned memory is reused only after copies from it are done: torch
        watches those."""
        if not self._pins:
            return data
        try:
            return pinned(data)
        except RuntimeError as error:
            self._pins = False
            warnings.warn(
                f"batches cannot be pinned, so the CPU waits for each copy to the GPU: {str(error).splitlines()[0]}. "
                "Fix: more locked memory (ulimit -l, a container's limits), or --accelerator.pin_memory false",
                stacklevel=2,
            )
            return data


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

    def __init__(self, prefetcher: Prefetcher, run: Run, loader: Iterable[Any], index: int, most: int | None) -> None:
        self._prefetcher, self._module, self._index, self._left = prefetcher, run.module, index, most
        self._iterator: Iterator[Any] | None = iter(loader)
        self._copies: deque[_Copy] = deque()
        self._failure: Exception | None = None

    def __iter__(self) -> Ahead:
        return self

    def __next__(self) -> Any:
        compute = torch.cuda.current_stream(self._prefetcher.device)
        while self._iterator is not None and len(self._copies) <= self._prefetcher.prefetch:
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
            # On the compute stream, as everything of the user's: a loader that works on the GPU does so in the order of the plain loop.
            source = next(self._iterator)
        except StopIteration:
            self._iterator = None
            return
        self._left = None if self._left is None else self._left - 1
        source = self._prefetcher.pin(self._module.on_before_batch_transfer(source, self._index))
        side = self._prefetcher.side
        # The copy starts when everything queued so far is done, which is what makes its memory safe to write, see above, and a source
        # on the GPU safe to read. The step that comes next is queued after this: the copy runs beside it.
        side.wait_stream(compute)
        with torch.cuda.stream(side):
            self._copies.append(_Copy(source, move(source, self._prefetcher.device), side.record_event()))

    def _due(self, compute: torch.cuda.Stream) -> Any:
        """The oldest copy; nothing here keeps it, so that its memory is free for another copy as soon as the loop has let it go."""
        due = self._copies.popleft()
        # The GPU's compute stream waits here, not the CPU; with a prefetch of 1 the copy ran beside the step before.
        compute.wait_event(due.done)
        # When the batch is due and on the compute stream: this may read buffers that training changes.
        return self._module.on_after_batch_transfer(due.batch, self._index)


def pinned(data: Any) -> Any:
    """``data`` with every strided CPU tensor, and everything else that has ``pin_memory()``, in pinned memory; what is pinned already
    stays as it is.

    Raises:
        RuntimeError: the system gives no more such memory.
    """
    if isinstance(data, torch.Tensor):
        pageable = data.device.type == "cpu" and data.layout is torch.strided and not data.is_pinned()
        return data.pin_memory() if pageable else data
    if callable(getattr(data, "pin_memory", None)):
        return data.pin_memory()
    return map_nested(data, pinned)


def most(run: Run, stage: str, index: int) -> int | None:
    """How many batches of a loader the loop will ask for, at most; ``None`` if it cannot be known."""
    options, count = run.plan.options, run.batches[stage][index]
    if stage == "train":
        left = None if options.max_steps == -1 else (options.max_steps - run.step) * options.accumulate_grad_batches
        return min((number for number in (count, left) if number is not None), default=None)
    if run.stage == "sanity_check" and options.num_sanity_val_steps != -1:
        count = options.num_sanity_val_steps if count is None else min(count, options.num_sanity_val_steps)
    return None if count is None else max(count, 1)  # a rank without batches of its own reads one, to repeat it
