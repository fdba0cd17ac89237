"""Streams that keep account of what is ordered before what, and memory that is handed out again as soon as it is free.

Each stream has a vector clock: how much of every stream is certain to be done when its next work starts. Every access to a block of
memory must be ordered after the accesses that it must not overlap; one that is not is a :class:`Race`, whether or not a GPU would have
shown it. The allocator is the harshest there can be: a block that is let go is the next one given out on its stream.
"""

import contextlib
import itertools

import pytest
import torch


class Race(AssertionError):
    """Two accesses that no wait orders."""


class GPU:
    """``torch.cuda`` as far as batches need it; one device."""

    def __init__(self, monkeypatch):
        self.compute = Stream(self)
        self.streams, self.free, self.numbers = [self.compute], {}, itertools.count()
        self.blocks = {}
        self.stack = [self.compute]
        monkeypatch.setattr(torch.cuda, "Stream", self._new_stream)
        monkeypatch.setattr(torch.cuda, "stream", self._enter)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.stack[-1])
        monkeypatch.setattr(
            torch.cuda, "synchronize", lambda *_: pytest.fail("the CPU waits for the GPU")
        )

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
        """A block of the current stream's pool: the one that was let go last, if there is one."""
        stream = self.current
        block = Block(next(self.numbers)) if not self.free.get(stream) else self.free[stream].pop()
        return Tensor(self, stream, block)


class Block:
    def __init__(self, number):
        self.number, self.accesses = number, []


class Tensor:
    """Memory on the GPU; its block goes back to its stream's pool when nothing refers to it any more."""

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
        """A copy, on the current stream, as an object's own ``to`` may make one of what is on the GPU already."""
        value = self.read()
        copy = self.gpu.allocate()
        copy.write(value)
        return copy

    def _access(self, writes):
        stream = self.gpu.current
        stream.advance()
        for other, when, wrote in self.block.accesses:
            if (writes or wrote) and stream.clock.get(other, 0) < when:
                kind = f"{'writes' if writes else 'reads'} block {self.block.number}, which another {'writes' if wrote else 'reads'}"
                raise Race(
                    f"stream {self.gpu.streams.index(stream)} {kind} with nothing between them"
                )
        self.block.accesses.append((stream, stream.clock[stream], writes))


class Stream:
    def __init__(self, gpu):
        self.gpu, self.clock, self.waits = gpu, {}, 0

    def advance(self):
        self.clock[self] = self.clock.get(self, 0) + 1

    def record_event(self):
        return dict(self.clock)

    def wait_event(self, event):
        self.waits += 1
        for stream, when in event.items():
            self.clock[stream] = max(self.clock.get(stream, 0), when)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def synchronize(self):
        pytest.fail("the CPU waits for the GPU")


class CPUBatch:
    """What a loader gives: an object that knows only how to go to a device."""

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
