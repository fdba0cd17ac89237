"""Fake CUDA streams that detect missing waits, and fake memory that is reused at once.

Each stream has a vector clock: the work of every stream that is certainly done when the stream's
next work starts. Each access to a block of memory must be ordered after the accesses that it must
not overlap. Otherwise it raises :class:`Race`, even if a GPU would not show the error. The
allocator is the strictest possible: a freed block is the next block that its stream gets.
"""

import contextlib
import itertools

import pytest
import torch


class Race(AssertionError):
    """Two accesses without a wait between them."""


class GPU:
    """The part of ``torch.cuda`` that batches need, for one device."""

    def __init__(self, monkeypatch):
        self.compute = Stream(self)
        self.streams, self.free, self.numbers = [self.compute], {}, itertools.count()
        self.blocks = {}
        self.stack = [self.compute]
        monkeypatch.setattr(torch.cuda, "Stream", self._new_stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", self._enter)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.stack[-1])
        waits = "the CPU waits for the GPU"
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail(waits))

    def _new_stream(self, device=None):
        self.streams.append(Stream(self))
        return self.streams[-1]

    @contextlib.contextmanager
    def _enter(self, stream):
        self.stack.append(stream)
        try:
            yield
        finally:
            self.stack.pop()

    @property
    def current(self):
        return self.stack[-1]

    def allocate(self):
        """Return memory of the current stream's pool: the block that was freed last, if any."""
        stream = self.current
        block = Block(next(self.numbers)) if not self.free.get(stream) else self.free[stream].pop()
        return Tensor(self, stream, block)


class Block:
    def __init__(self, number):
        self.number, self.accesses = number, []


class Tensor:
    """Memory on the GPU; its block returns to its stream's pool after the last reference."""

    def __init__(self, gpu, stream, block):
        self.gpu, self.stream, self.block, self.value = gpu, stream, block, None

    def __del__(self):
        self.gpu.free.setdefault(self.stream, []).append(self.block)

    def write(self, value):
        self._access(True)
        self.value = self.block.value = value

    def read(self):
        self._access(False)
        assert self.block.value == self.value, "the memory was given to another batch"
        return self.value

    def to(self, device):
        """Return a copy, on the current stream, as an object's ``to`` may return."""
        value = self.read()
        copy = self.gpu.allocate()
        copy.write(value)
        return copy

    def _access(self, writes):
        stream = self.gpu.current
        stream.advance()
        for other, when, wrote in self.block.accesses:
            if (writes or wrote) and stream.clock.get(other, 0) < when:
                mine, theirs = ("writes" if one else "reads" for one in (writes, wrote))
                raise Race(
                    f"stream {self.gpu.streams.index(stream)} {mine} block {self.block.number}, "
                    f"which another {theirs}, without a wait between them"
                )
        self.block.accesses.append((stream, stream.clock[stream], writes))


class Stream:
    def __init__(self, gpu):
        self.gpu, self.clock, self.waits = gpu, {}, 0

    def advance(self):
        self.clock[self] = self.clock.get(self, 0) + 1

    def wait_event(self, event):
        self.waits += 1
        for stream, when in event.clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), when)

    def synchronize(self):
        pytest.fail("the CPU waits for the GPU")


class Event:
    """A point in a stream's work. A stream waits for what was recorded when it was told to."""

    def __init__(self):
        self.clock = {}

    def record(self, stream):
        self.clock = dict(stream.clock)


class CPUBatch:
    """A loader's batch: an object that has only ``pin_memory`` and ``to``."""

    def __init__(self, gpu, value):
        self.gpu, self.value, self.pinned = gpu, value, False

    def pin_memory(self):
        same = CPUBatch(self.gpu, self.value)
        same.pinned = True
        return same

    def to(self, device):
        assert device == torch.device("cuda", 0)
        copy = self.gpu.allocate()
        copy.write(self.value)
        return copy
