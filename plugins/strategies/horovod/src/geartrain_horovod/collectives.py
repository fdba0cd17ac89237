"""Collectives on Horovod, each with a unique name.

Horovod matches the operations of different ranks by name; it names an unnamed one after a counter
of the process. It supports neither bfloat16 nor bool nor complex numbers, cannot gather tensors of
0 dimensions, and needs contiguous tensors. So objects and gathered tensors are sent as bytes.
"""

from __future__ import annotations

import ctypes
import pickle
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from geartrain import TrainingError
from geartrain_horovod.watchdog import Board, Wait, Watchdog

#: Seconds between two polls of an operation. Horovod's own wait is slower and blocks signals.
_LOOK = 0.0001
#: Seconds that ranks have to report that they are alive, after an operation failed.
_ROLL_CALL = 2.0


class Collectives:
    """The collective operations of one run.

    Args:
        hvd: the module ``horovod.torch``, initialised.
        run_number: the number of the run in this program; the same on every rank.
        stall_timeout: seconds that a rank waits for the others in one operation.
        rendezvous: address and port of Horovod's server, through which ranks report their state to
            each other; ``None`` if it does not exist.
        gone: the error to raise when another rank has gone.
    """

    def __init__(
        self,
        hvd: Any,
        run_number: int,
        stall_timeout: float,
        rendezvous: tuple[str, int] | None = None,
        gone: type[TrainingError] = TrainingError,
    ) -> None:
        self.hvd, self._gone = hvd, gone
        self.rank, self.size = int(hvd.rank()), int(hvd.size())
        self._prefix = f"geartrain.{run_number}"
        self._counts: Counter[str] = Counter()
        self._board = None if rendezvous is None else Board(*rendezvous, self._prefix)
        self._watchdog = Watchdog(stall_timeout, self.rank, self.size, self._board)

    def name(self, what: str) -> str:
        """Return a name that is the same on every rank, for a repeated operation."""
        return f"{self._prefix}.{what}"

    def next_name(self, kind: str) -> str:
        """Return a new name, the same on every rank that made the same calls."""
        self._counts[kind] += 1
        return self.name(f"{kind}.{self._counts[kind]}")

    def wait(self, handle: int, name: str, what: str) -> Any:
        """Wait for a started operation and return its result.

        Args:
            name: the name under which it was started.
            what: the operation in words, for errors.

        Raises:
            TrainingError: another rank has gone, or ran another operation under the same name.
        """
        with self.watched(what, name) as wait:
            while not self.hvd.poll(handle):
                wait.check()
                time.sleep(_LOOK)
            return self.hvd.synchronize(handle)

    def start(self, operation: str, *given: Any, name: str, **options: Any) -> int:
        """Start one of Horovod's operations and return its handle.

        Raises:
            TrainingError: another rank has already gone.
        """
        with self.watched("start of", name):
            handle: int = getattr(self.hvd, operation)(*given, name=name, **options)
        return handle

    @contextmanager
    def watched(self, what: str, name: str) -> Iterator[Wait]:
        """Guard a wait for other ranks: watch its time and explain its errors.

        Raises:
            TrainingError: as :meth:`wait`.
        """
        with self._watchdog.watching(what, name) as wait, self.explained(what, name):
            yield wait

    @contextmanager
    def explained(self, what: str, name: str) -> Iterator[None]:
        """Guard code that may start Horovod's operations but waits for none of them.

        Raises:
            TrainingError: as :meth:`wait`.
        """
        try:
            yield
        except self.hvd.HorovodInternalError as error:
            lines = str(error).strip().splitlines() or ["no reason given"]
            gone = (
                "a peer has gone: "
                if any(word in lines[0] for word in ("shut down", "onnect", "gloo/transport"))
                else ""
            )
            silent = self._roll_call() if gone else []
            who = f"no answer from rank {', '.join(map(str, silent))}: " if silent else ""
            kind = self._gone if gone else TrainingError
            raise kind(f"rank {self.rank}: {what} {name}: {gone}{who}{lines[0]}") from error

    def say_here(self) -> None:
        """Report to the other ranks that this rank is alive, although its run has failed."""
        if self._board is not None:
            self._board.put(f"here-{self.rank}", "1")

    def _roll_call(self) -> list[int]:
        """Return the ranks that do not report that they are alive."""
        if self._board is None:
            return []
        self.say_here()
        silent = [rank for rank in range(self.size) if rank != self.rank]
        deadline = time.monotonic() + _ROLL_CALL
        try:
            while silent and time.monotonic() < deadline:
                silent = [rank for rank in silent if self._board.get(f"here-{rank}") is None]
                time.sleep(0.05)
        except OSError:  # rank 0, which may run the server, has gone
            return []
        return silent

    def leave(self, shutdown: Callable[[], Any], failed: bool) -> None:
        """Leave the others.

        Args:
            shutdown: leaves Horovod.
            failed: whether the run failed.
        """
        self._watchdog.leave(shutdown, failed)

    # --- bytes -----------------------------------------------------------------------------------

    def _gather_rows(self, row: torch.Tensor, name: str, what: str) -> torch.Tensor:
        """Gather ``[n]`` on the CPU, of the same length on all ranks, to ``[size, n]``."""
        table: torch.Tensor = self.wait(
            self.start("allgather_async", row[None].contiguous(), name=name), name, what
        )
        return table

    def gather_values(self, values: torch.Tensor) -> torch.Tensor:
        """Gather float64 ``[n]`` of every rank to ``[size, n]``, on the CPU."""
        return self._gather_rows(values.detach().cpu(), self.next_name("log_sync"), "log_sync")

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
        """Gather a tensor of every rank; only the first dimension may differ.

        Returns:
            ``[size, *shape]``, or a list with one tensor per rank if first dimensions differ.

        Raises:
            TrainingError: other dimensions or types differ.
        """
        name = self.next_name("all_gather")
        shapes = self._shapes(tensor, name)
        whole = self.wait(
            self.start("allgather_async", _bytes(tensor), name=name), name, "all_gather"
        )
        sizes = [_numel(shape) * tensor.element_size() for shape in shapes]
        # Copy each part: a view of another dtype must begin at a multiple of the dtype's size.
        parts = [
            part.clone().view(tensor.dtype).reshape(shape)
            for part, shape in zip(torch.split(whole, sizes), shapes, strict=True)
        ]
        parts = [part.to(tensor.device) for part in parts]
        return torch.stack(parts) if all(shape == shapes[0] for shape in shapes) else parts

    def _shapes(self, tensor: torch.Tensor, name: str) -> list[list[int]]:
        """Return each rank's shape."""
        # 64 numbers, as many as torch has dimensions.
        header = torch.tensor(
            [
                tensor.ndim,
                *tensor.shape,
                *[0] * (64 - tensor.ndim),
                zlib.crc32(str(tensor.dtype).encode()),
            ]
        )
        table = self._gather_rows(header, f"{name}.shape", "all_gather").tolist()
        shapes = [row[1 : 1 + row[0]] for row in table]
        for rank, (row, shape) in enumerate(zip(table, shapes, strict=True)):
            if row[-1] != table[0][-1]:
                raise TrainingError(
                    f"all_gather: rank 0 and rank {rank} have tensors of different types; "
                    f"this rank's is {tensor.dtype}."
                )
            if len(shape) != len(shapes[0]) or shape[1:] != shapes[0][1:]:
                raise TrainingError(
                    f"all_gather: rank 0 has the shape {shapes[0]} and rank {rank} {shape}; "
                    "only the first dimension may differ."
                )
        return shapes

    def broadcast(self, obj: Any, src: int) -> Any:
        """Return rank ``src``'s object on every rank."""
        name, is_source = self.next_name("broadcast"), self.rank == src
        data = (
            torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
            if is_source
            else torch.empty(0, dtype=torch.uint8)
        )
        size = torch.tensor([len(data)])
        size = self.wait(
            self.start("broadcast_async_", size, src, name=f"{name}.size"),
            f"{name}.size",
            "broadcast",
        )
        data = data if is_source else torch.empty(int(size), dtype=torch.uint8)
        data = self.wait(self.start("broadcast_async_", data, src, name=name), name, "broadcast")
        return obj if is_source else pickle.loads(ctypes.string_at(data.data_ptr(), len(data)))

    def broadcast_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copy rank 0's tensors to every rank, in place. All are sent at the same time."""
        sent = []
        for key, tensor in tensors.items():
            name = self.next_name(f"weights.{key}")
            data = _bytes(tensor).clone()
            sent.append((self.start("broadcast_async_", data, 0, name=name), name, tensor))
        for handle, name, tensor in sent:
            data = self.wait(handle, name, "broadcast")
            tensor.detach().copy_(data.view(tensor.dtype).reshape(tensor.shape))

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self._gather_rows(torch.zeros(1), self.next_name("barrier"), "barrier")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's memory as uint8 ``[n]`` on the CPU."""
    return (
        tensor.detach()
        .cpu()
        .resolve_conj()
        .resolve_neg()
        .contiguous()
        .reshape(-1)
        .view(torch.uint8)
    )


def _numel(shape: list[int]) -> int:
    number = 1
    for length in shape:
        number *= length
    return number
