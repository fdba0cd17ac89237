"""The connections between the processes of a run, from one change of them to the next."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from geartrain.parallel import sockets
from geartrain_elastic.tree import Node, total, whole_nodes
from geartrain_parallel import sealed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

#: Bytes that every process sends in the first round of ``gather``; larger data needs a second.
_BLOCK = 8192
_LENGTH = 8


class Group:
    """A group of gloo, beside torch's default group, which a user's code may want to make.

    Args:
        store: new for this group.
        index: this process's, from 0.
        ranks: the ranks of each process.
        timeout: of the start.

    Raises:
        RuntimeError: by all methods, if a process has gone.
    """

    def __init__(
        self, store: Store, index: int, ranks: Sequence[Sequence[int]], timeout: timedelta
    ) -> None:
        self.index, self._ranks, self.size = index, ranks, len(ranks)
        self._root = (0, max(map(max, (each for each in ranks if each))) + 1)
        self._gloo: Any = None
        self._sockets: set[tuple[int, str]] = set()
        if self.size > 1:
            before = sockets.open_sockets()
            self._gloo = dist.ProcessGroupGloo(store, index, self.size, timeout)
            self._sockets = sockets.open_sockets() - before
            self._gloo._set_default_timeout(timedelta(days=1))  # hangs are the supervisor's work

    def close(self) -> None:
        """Close the connections: the other processes' calls raise, too."""
        sockets.shut_down(self._sockets)
        self._sockets, self._gloo = set(), None

    def gather(self, data: bytes) -> list[bytes]:
        """Return the data of all processes, in order."""
        if self.size == 1:
            return [data]
        gloo, sent = self._connected(), sealed.seal(data)
        first = _to_tensor(len(sent).to_bytes(_LENGTH, "little") + sent[: _BLOCK - _LENGTH])
        block = torch.zeros(_BLOCK, dtype=torch.uint8)
        block[: len(first)] = first
        table = torch.empty(self.size * _BLOCK, dtype=torch.uint8)
        gloo._allgather_base(table, block).wait()
        rows = [_to_bytes(row) for row in torch.split(table, _BLOCK)]
        lengths = [int.from_bytes(row[:_LENGTH], "little") for row in rows]
        found = [row[_LENGTH : _LENGTH + n] for row, n in zip(rows, lengths, strict=True)]
        most = max(lengths) - (_BLOCK - _LENGTH)
        if most > 0:
            tail = torch.zeros(most, dtype=torch.uint8)
            if more := sent[_BLOCK - _LENGTH :]:
                tail[: len(more)] = _to_tensor(more)
            table = torch.empty(self.size * most, dtype=torch.uint8)
            gloo._allgather_base(table, tail).wait()
            tails = map(_to_bytes, torch.split(table, most))
            found = [(head + tail)[:n] for head, tail, n in zip(found, tails, lengths, strict=True)]
        return [sealed.unseal(each) for each in found]

    def send(self, data: bytes, index: int) -> None:
        """Send data to one process, which calls :meth:`receive`."""
        sent = _to_tensor(sealed.seal(data))
        self._connected().send([torch.tensor([len(sent)])], index, 0).wait()
        self._connected().send([sent], index, 1).wait()

    def receive(self, index: int) -> bytes:
        """Return the data that a process sent to this one."""
        length = torch.zeros(1, dtype=torch.int64)
        self._connected().recv([length], index, 0).wait()
        data = torch.empty(int(length), dtype=torch.uint8)
        self._connected().recv([data], index, 1).wait()
        return sealed.unseal(_to_bytes(data))

    def sum(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of all ranks' tensors, in the order of the tree.

        Two processes exchange their halves of the tree; more add one part each, so that each sends
        as much as in a ring.

        Args:
            leaves: the tensor ``[n]`` of each rank of this process, in the order of ranks; they
                are changed.
        """
        local = dict(zip(((r, r + 1) for r in self._ranks[self.index]), leaves, strict=True))
        nodes = [whole_nodes(self._root, ranks) for ranks in self._ranks]
        sums = {node: total(node, local.get) for node in nodes[self.index]}
        if self.size == 1:
            return sums[self._root]
        if self.size == 2:
            return self._exchange(nodes, sums)
        return self._scatter(nodes, sums, leaves[0])

    def _exchange(self, nodes: list[list[Node]], sums: dict[Node, torch.Tensor]) -> torch.Tensor:
        other, gloo = 1 - self.index, self._connected()
        example = next(iter(sums.values()))
        received = {node: torch.empty_like(example) for node in nodes[other]}
        works = [gloo.send([each], other, node[0] + 2) for node, each in sums.items()]
        works += [gloo.recv([each], other, node[0] + 2) for node, each in received.items()]
        for work in works:
            work.wait()
        return total(self._root, {**sums, **received}.get)

    def _scatter(
        self, nodes: list[list[Node]], sums: dict[Node, torch.Tensor], example: torch.Tensor
    ) -> torch.Tensor:
        gloo, size = self._connected(), self.size
        part = -(-example.numel() // size)
        rows = example.new_zeros(len(sums), size * part)
        for row, each in zip(rows, sums.values(), strict=True):
            row[: each.numel()] = each
        sent = rows.view(-1, size, part).transpose(0, 1).contiguous().view(-1)
        counts = [len(each) for each in nodes]
        received = example.new_empty(sum(counts) * part)
        gloo.alltoall_base(
            received, sent, [n * part for n in counts], [len(sums) * part] * size
        ).wait()
        known = dict(
            zip((n for each in nodes for n in each), torch.split(received, part), strict=True)
        )
        result = total(self._root, known.get).contiguous()
        table = example.new_empty(size * part)
        gloo._allgather_base(table, result).wait()
        return table[: example.numel()]

    def _connected(self) -> Any:
        if self._gloo is None:
            raise RuntimeError("the connection is closed")
        return self._gloo


def _to_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _to_bytes(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
