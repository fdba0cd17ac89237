"""Sockets between ranks: listen on one address, find rank 0, close connections after a failure."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Any

from geartrain import TrainingError
from geartrain.plugin_api import ClusterEnvironment

_LOOPBACK = "127.0.0.1"


def bind(address: str, port: int | None) -> socket.socket:
    """Return a listening socket on one address only.

    Raises:
        TrainingError: the port is taken, or the address is not this machine's.
    """
    family = _resolve(address)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port or 0))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise TrainingError(
            f"rank 0 cannot listen on {address}:{port}: {error.strerror}. "
            "Fix: set MASTER_ADDR to this node's address and MASTER_PORT to a free port"
        ) from error
    return listener


def own_address(place: ClusterEnvironment) -> str:
    """Return the address at which other ranks reach this one: loopback if all are on this node.

    Raises:
        TrainingError: rank 0's node cannot be reached.
    """
    assert place.master_addr is not None
    if place.nodes == 1:
        return _LOOPBACK
    family, there = _resolve(place.master_addr)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(there)  # asks the routing table and sends nothing
        except OSError as error:
            raise _unreachable(place.master_addr, error) from error
        return str(probe.getsockname()[0])


def interface(place: ClusterEnvironment) -> str | None:
    """Return the network interface that leads to rank 0, or ``None`` if it is not known.

    Without it, gloo resolves its host name and listens there.
    """
    address = own_address(place)
    if address.startswith("127."):
        return "lo" if Path("/sys/class/net/lo").exists() else "lo0"
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == address), None)


def open_sockets() -> set[tuple[int, str]]:
    """Return this process's open sockets as (descriptor, identity); none without /proc."""
    found = set()
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor of the listing itself
            continue
        if target.startswith("socket:"):
            found.add((int(name), target))
    return found


def shut_down(sockets: set[tuple[int, str]]) -> None:
    """Close the TCP connections of a run that failed; their owners keep the descriptors."""
    for descriptor, _ in sockets:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            is_internet = connection.family in (socket.AF_INET, socket.AF_INET6)
            if is_internet and connection.type == socket.SOCK_STREAM:
                # getpeername() raises for a listening socket, which must stay: gloo aborts if
                # accept() fails.
                connection.getpeername()
                connection.shutdown(socket.SHUT_RDWR)


def _resolve(address: str) -> tuple[int, Any]:
    """Return family and socket address of a host's name or address."""
    try:
        family, _, _, _, there = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise _unreachable(address, error) from error
    return family, there


def _unreachable(address: str, error: OSError) -> TrainingError:
    return TrainingError(
        f"rank 0's node cannot be reached: MASTER_ADDR={address}: {error.strerror}. "
        "Fix: set it to the node's name or address as seen from this node"
    )


def _address_of(interface: str) -> str | None:
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = struct.pack("256s", interface.encode()[:15])
            answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
