"""Files without a name, through which a starter and its ranks hand each other what may be gigabytes.

Unlike a pipe nobody must read while another writes, and unlike a named file nothing is left behind, whoever is killed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import struct
import tempfile
from multiprocessing import reduction
from typing import IO, Any

import cloudpickle  # type: ignore[import-untyped]
import torch

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


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles by value what is defined in a script or a notebook, so that a rank need not run that again; tensors' memory goes to
    ``buffers``, once for all tensors that share it."""

    def __init__(self, file: IO[bytes], buffers: Any = None) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers)
        self._storages: dict[int, torch.UntypedStorage] = {}

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.UntypedStorage and obj.nbytes():
            memory = (ctypes.c_char * obj.nbytes()).from_address(obj.data_ptr())
            return _storage, (pickle.PickleBuffer(memory),)
        if type(obj) is torch.Tensor and _is_plain(obj):
            storage = self._storages.setdefault(obj.untyped_storage().data_ptr(), obj.untyped_storage())
            return _tensor, (storage, obj.dtype, obj.storage_offset(), obj.shape, obj.stride(), obj.requires_grad)
        return super().reducer_override(obj)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its memory and shape say all of it; torch pickles any other itself."""
    strided = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_quantized
    return bool(
        strided and tensor.is_leaf and not (tensor.is_conj() or tensor.is_neg() or tensor._backward_hooks) and len(tensor.__dict__) == 0
    )


def _storage(buffer: Any) -> torch.UntypedStorage:
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _tensor(storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, shape: Any, stride: Any, requires_grad: bool) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride).requires_grad_(requires_grad)


def _received(duplicate: Any) -> AnonymousFile:
    return AnonymousFile(duplicate.detach())
