"""Bring the samples of all nodes to rank 0, where loggers write."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

    from geartrain import Run

#: The most seconds that the store may take to answer.
_TIMEOUT = timedelta(seconds=10)


class Nodes:
    """Exchange samples: each node writes its newest sample to the run's store; rank 0 reads them.

    No node waits for another. This thread has its own connection, because clients of one
    connection wait for each other, and one client may be a process group that waits for a rank.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._count = run, run.plan.num_nodes
        self._store: TCPStore | None = None

    def connect(self) -> None:
        """Connect to the store, if there are several nodes and a store.

        Raises:
            DistError: the store does not answer.
        """
        store = self._run.store
        if self._count > 1 and store is not None:
            from torch._C._distributed_c10d import TCPStore

            address, port = store.host, store.port  # type: ignore[attr-defined]  # a TCPStore's
            self._store = TCPStore(
                address, port, None, False, timeout=_TIMEOUT, wait_for_workers=False
            )

    def exchange(self, figures: dict[str, float]) -> dict[str, float]:
        """Write this node's newest values; on rank 0, read those of all nodes.

        Returns:
            With one node, the values. On rank 0 the newest values of every node, with ``node<N>_``
            before each name; on other nodes nothing.

        Raises:
            DistError: the store no longer exists.
        """
        if self._count == 1:
            return figures
        store, world, found = self._store, self._run.world, {self._run.world.node_rank: figures}
        if store is not None and world.rank != 0:
            store.set(_key(world.node_rank), json.dumps(figures))
            return {}
        for node in range(self._count):
            # Check first, because get() alone would wait for the value.
            if store is not None and node != world.node_rank and store.check([_key(node)]):
                found[node] = json.loads(store.get(_key(node)))
        return {
            f"node{node}_{name}": value
            for node in sorted(found)
            for name, value in found[node].items()
        }


def _key(node: int) -> str:
    return f"geartrain-monitor/node{node}"
