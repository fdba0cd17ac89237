"""Find this node's number, and rank 0's address."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import replace

from geartrain import UsageError
from geartrain.plugin_api import ClusterEnvironment


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


def with_address(
    place: ClusterEnvironment, environ: Mapping[str, str] = os.environ
) -> ClusterEnvironment:
    """Add the address of rank 0's store to the place of a rank that a launcher has started.

    Raises:
        UsageError: with several nodes, the launcher and the environment have no address or port.
    """
    address = environ.get("MASTER_ADDR") or place.master_addr
    if address is None:
        if place.nodes > 1:
            message = f"{place.launcher} started {place.size} processes on {place.nodes} nodes"
            raise UsageError(f"{message}, and none knows where rank 0 is. Fix: set MASTER_ADDR")
        address = "127.0.0.1"
    given = ClusterEnvironment.read_numbers(environ, "MASTER_PORT")
    # Every rank derives the same port from the job's name; MASTER_PORT replaces it if it is in use.
    if given is None and place.job is None and place.nodes > 1:
        message = (
            f"{place.launcher} names no job from which {place.nodes} nodes could derive a port"
        )
        raise UsageError(f"{message}. Fix: set MASTER_PORT")
    derived = 20000 + zlib.crc32((place.job or str(os.getppid())).encode()) % 20000
    return replace(place, master_addr=address, master_port=given[0] if given else derived)
