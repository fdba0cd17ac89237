"""Files without a name, through which a starter and its ranks hand each other what may be gigabytes.

Unlike a pipe nobody must read while another writes, and unlike a named file nothing is left behind, whoever is killed.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from multiprocessing import reduction
from typing import IO, Any


class AnonymousFile:
    """A file that vanishes with the last process that has it open; in memory where the system has such files.

    It can be an argument of a process that is being started, by any start method.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is not None:
            self.descriptor = descriptor
        elif hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("geartrain")
        else:
            with tempfile.TemporaryFile(prefix="geartrain-") as file:
                self.descriptor = os.dup(file.fileno())

    def open_to_write(self) -> IO[bytes]:
        """The file, to be written from its beginning by one process."""
        return os.fdopen(os.dup(self.descriptor), "wb")

    def read(self) -> memoryview:
        """What it holds, without a copy; empty where nothing was written. Several processes may read it at a time."""
        size = os.fstat(self.descriptor).st_size
        # Mapped, because a descriptor that another process has too shares its position with that.
        return memoryview(mmap.mmap(self.descriptor, size, prot=mmap.PROT_READ)) if size else memoryview(b"")

    def close(self) -> None:
        os.close(self.descriptor)

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.descriptor),)


def _received(duplicate: Any) -> AnonymousFile:
    return AnonymousFile(duplicate.detach())
