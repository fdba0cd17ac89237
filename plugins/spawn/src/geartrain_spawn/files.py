"""Files without a name, through which a starter and its ranks hand each other what may be gigabytes.

Unlike a pipe it needs no reader while it is written, and unlike a named file nothing is left if a process is killed.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import tempfile
from multiprocessing import reduction
from typing import Any

from geartrain_spawn.pickles import Pickler

#: Where in a file a tensor's memory may begin: what torch's own allocator keeps to.
_ALIGNED = 64
_LENGTH = struct.Struct("<Q")


class AnonymousFile:
    """A file that vanishes with the last process that has it open; in memory where the system has such files.

    It holds one pickled object, with the memory of its tensors beside the pickle: readers map it, so that weights are neither copied
    into the pickle nor out of it. It can be an argument of a process that is being started, by any start method.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is not None:
            self.descriptor = descriptor
        elif hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("geartrain")
        else:
            with tempfile.TemporaryFile(prefix="geartrain-") as file:
                self.descriptor = os.dup(file.fileno())

    def dump(self, thing: Any) -> None:
        """Write an object, from the beginning.

        Raises:
            Exception: it cannot be pickled; the file is then empty.
        """
        os.ftruncate(self.descriptor, 0)
        os.lseek(self.descriptor, 0, os.SEEK_SET)
        buffers: list[pickle.PickleBuffer] = []
        with os.fdopen(os.dup(self.descriptor), "wb") as file:
            try:
                Pickler(file, buffers.append).dump(thing)
            except BaseException:
                file.flush()
                file.truncate(0)
                raise
            places = []
            for buffer in buffers:
                file.write(bytes(-file.tell() % _ALIGNED))
                raw = buffer.raw()
                places.append((file.tell(), raw.nbytes))
                file.write(raw)
            index = pickle.dumps(places)
            file.write(index + _LENGTH.pack(len(index)))

    def load(self) -> Any:
        """The object, its tensors in memory that this process alone sees change; ``None`` where nothing was written."""
        size = os.fstat(self.descriptor).st_size
        if not size:
            return None
        # Mapped, because a descriptor that another process has too shares its position with that. A copy of a page is made when it
        # is first written, so that a rank's weights cost memory once they change.
        data = memoryview(mmap.mmap(self.descriptor, size, access=mmap.ACCESS_COPY))
        (length,) = _LENGTH.unpack(data[-_LENGTH.size :])
        places = pickle.loads(data[-_LENGTH.size - length : -_LENGTH.size])
        return pickle.loads(data, buffers=[data[start : start + count] for start, count in places])

    def is_empty(self) -> bool:
        return os.fstat(self.descriptor).st_size == 0

    def close(self) -> None:
        os.close(self.descriptor)

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.descriptor),)


def _received(duplicate: Any) -> AnonymousFile:
    return AnonymousFile(duplicate.detach())
