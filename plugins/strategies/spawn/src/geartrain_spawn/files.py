"""Files without a name, by which a starter and its ranks exchange objects of up to gigabytes.

A pipe would need a reader during the write. A named file would stay behind if a process is killed.
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

#: Alignment of a tensor's memory in the file, in bytes, as in torch's allocator.
_ALIGNED = 64
_LENGTH = struct.Struct("<Q")


class AnonymousFile:
    """A file that vanishes when the last process closes it; in memory if the system has such files.

    It holds one pickled object and, beside the pickle, the memory of its tensors. Readers map the
    file, so that weights are not copied into or out of the pickle. The object can be an argument of
    a process that is started, with any start method.
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
        """Replace the file's content by an object.

        Raises:
            Exception: the object cannot be pickled; the file is then empty.
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
        """Return the object; ``None`` if the file is empty. Changes of its tensors stay local."""
        size = os.fstat(self.descriptor).st_size
        if not size:
            return None
        # Mapped, because processes that share a descriptor share its position. A page is copied at
        # its first write, so a rank's weights cost memory only when they change.
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
