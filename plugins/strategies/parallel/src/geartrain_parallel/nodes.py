"""Find this node's number and rank 0's address if geartrain starts the ranks, not a launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping

from geartrain import UsageError


def node_rank(num_nodes: int, environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of this node, from ``NODE_RANK``.

    Raises:
        UsageError: it is not set although there are several nodes, or it is not below
            ``num_nodes``.
    """
    text = environ.get("NODE_RANK", environ.get("GROUP_RANK", "0" if num_nodes == 1 else ""))
    if not text.isdigit():
        raise UsageError(
            f"num_nodes={num_nodes}: set NODE_RANK (0 to {num_nodes - 1}), MASTER_ADDR and "
            f"MASTER_PORT on each node; NODE_RANK={text!r}"
        )
    if int(text) >= num_nodes:
        raise UsageError(
            f"NODE_RANK={text} is outside num_nodes={num_nodes}: "
            f"nodes are numbered 0 to {num_nodes - 1}."
        )
    return int(text)


def master(num_nodes: int, environ: Mapping[str, str] = os.environ) -> tuple[str, int | None]:
    """Return the address and the port of rank 0's store: on one node loopback and any free port.

    Raises:
        UsageError: ``MASTER_ADDR`` or ``MASTER_PORT`` is not set although there are several nodes.
    """
    if num_nodes == 1:
        return "127.0.0.1", None
    address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not address or not port.isdigit():
        raise UsageError(
            f"num_nodes={num_nodes}: every node must know the address of rank 0. "
            "Fix: set MASTER_ADDR (node 0's address) and MASTER_PORT (a free port there) on each "
            f"node; MASTER_ADDR={address!r}, MASTER_PORT={port!r}"
        )
    return address, int(port)
