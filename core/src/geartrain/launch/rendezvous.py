"""The stores through which ranks meet: one for the program, and a fresh one for every run.

``TCPStore("127.0.0.1")`` listens on every interface, so rank 0 binds the socket itself and hands it over. A fresh store a run, because
a process group that is made anew in an old store, by a second ``fit`` or a torchrun restart, may read the first one's keys.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistError, DistNetworkError

from geartrain.errors import TrainingError
from geartrain.launch.cluster import ClusterEnvironment

_LOOPBACK = "127.0.0.1"
#: The program's store by the process that made it: a forked rank must connect anew, and must not destroy its starter's server.
_program: dict[int, TCPStore] = {}


def bind(address: str, port: int | None) -> socket.socket:
    """A listening socket on one address only.

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
            f"rank 0 cannot listen on {address}:{port}: {error.strerror}. Fix: MASTER_ADDR must be this node's address and MASTER_PORT free"
        ) from error
    return listener


def serve(listener: socket.socket, timeout: timedelta) -> TCPStore:
    """A store on a bound socket, which it takes over."""
    address, port = listener.getsockname()[:2]
    return TCPStore(address, port, None, True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach())


def connect(address: str, port: int, timeout: timedelta, rank: int) -> TCPStore:
    """The store of rank 0.

    Raises:
        TrainingError: nobody answers there until the timeout.
    """
    try:
        return TCPStore(address, port, None, False, timeout=timeout, wait_for_workers=False)
    except (DistError, RuntimeError, ValueError) as error:
        raise TrainingError(
            f"rank {rank} reached no rank 0 at {address}:{port} within {timeout.total_seconds():.0f} s. Fix: MASTER_ADDR and MASTER_PORT "
            f"must be the same on every node and reachable from it ({str(error).splitlines()[0]})"
        ) from error


def serve_program(address: str, port: int | None, timeout: timedelta) -> int:
    """Serve the store of this program, once, before other ranks are started.

    Returns:
        Its port.

    Raises:
        TrainingError: the port is taken, or the address is not this machine's.
    """
    if os.getpid() not in _program:
        _program[os.getpid()] = serve(bind(address, port), timeout)
    return int(_program[os.getpid()].port)


def run_store(place: ClusterEnvironment, key: str, timeout: timedelta) -> TCPStore:
    """Return a fresh store for one run of this program; ``MASTER_ADDR`` and ``MASTER_PORT`` then name it, so that
    ``torch.distributed.init_process_group("gloo")`` meets there.

    Args:
        key: names the run. No other run of the program may have it: a rank could read where that one's store was.

    Raises:
        TrainingError: rank 0 cannot be reached, or does not come; or an earlier run has failed, which closed the connection to the store.
    """
    assert place.master_addr is not None
    assert place.master_port is not None
    # A restart by torchrun is another program to the store that its agents keep.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if os.getpid() not in _program:
        hosts = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        _program[os.getpid()] = (
            serve(bind(place.master_addr, place.master_port), timeout)
            if hosts
            else connect(place.master_addr, place.master_port, timeout, place.rank)
        )
    program = PrefixStore(f"geartrain/{attempt}", _program[os.getpid()])
    store = serve(bind(_own_address(place), None), timeout) if place.rank == 0 else None
    try:
        if store is not None:
            program.set(f"run/{key}", f"{store.host} {store.port}")
        address, port = program.get(f"run/{key}").decode().split()
    except DistNetworkError as error:
        lost = "the connection through which ranks meet is closed, as after a run that failed"
        raise TrainingError(f"rank {place.rank} cannot begin a run: {lost} ({error}). Fix: start the program again") from error
    except (DistError, RuntimeError) as error:
        raise TrainingError(f"rank {place.rank} waited {timeout.total_seconds():.0f} s for rank 0 to begin this run: {error}") from error
    if store is None:
        store = connect(address, int(port), timeout, place.rank)
    os.environ.update(MASTER_ADDR=store.host, MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True")
    return store


def _own_address(place: ClusterEnvironment) -> str:
    """The address by which other ranks reach this one: loopback where all are on this node."""
    assert place.master_addr is not None
    return _LOOPBACK if place.nodes == 1 else _route(place.master_addr)


def _route(address: str) -> str:
    """This node's address on the way to another; asks the routing table and sends nothing.

    Raises:
        TrainingError: no way leads there.
    """
    family, there = _resolve(address)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(there)
        except OSError as error:
            raise _unreachable(address, error) from error
        return str(probe.getsockname()[0])


def _resolve(address: str) -> tuple[int, Any]:
    """Family and socket address of a host's name or number."""
    try:
        family, _, _, _, there = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise _unreachable(address, error) from error
    return family, there


def _unreachable(address: str, error: OSError) -> TrainingError:
    return TrainingError(
        f"rank 0's node cannot be reached: MASTER_ADDR={address}: {error.strerror}. Fix: its name or number as seen from here"
    )


def interface(place: ClusterEnvironment) -> str | None:
    """The network interface that leads to rank 0: what gloo must use, which would otherwise look its own host name up and listen
    there. ``None`` where it cannot be told."""
    assert place.master_addr is not None
    mine = _LOOPBACK if place.nodes == 1 else _route(place.master_addr)
    if mine.startswith("127."):
        return "lo" if Path("/sys/class/net/lo").exists() else "lo0"
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == mine), None)


def _address_of(name: str) -> str | None:
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
