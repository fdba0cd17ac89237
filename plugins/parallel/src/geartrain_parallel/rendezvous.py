"""The stores through which ranks meet: one for the program, and a fresh one for every run.

``TCPStore("127.0.0.1")`` listens on every interface, so rank 0 binds the socket itself and hands it over. A fresh store a run, because
a process group that is made again in an old store, by a second ``fit`` or a torchrun restart, may read the first one's keys.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistError, DistNetworkError

from geartrain import TrainingError
from geartrain.plugin_api import ClusterEnvironment
from geartrain_parallel.sockets import bind, own_address

#: The program's store by the process that made it: a forked rank must connect again, and must not destroy its starter's server.
_program: dict[int, TCPStore] = {}


def serve(listener: socket.socket, timeout: timedelta) -> TCPStore:
    """Return a store on a bound socket, which it takes over."""
    address, port = listener.getsockname()[:2]
    return TCPStore(
        address,
        port,
        None,
        True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def connect(address: str, port: int, timeout: timedelta, rank: int) -> TCPStore:
    """Return the store of rank 0.

    Raises:
        TrainingError: there is no answer until the timeout.
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
    if place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        serve_program(place.master_addr, place.master_port, timeout)
    elif os.getpid() not in _program:
        _program[os.getpid()] = connect(place.master_addr, place.master_port, timeout, place.rank)
    program = PrefixStore(f"geartrain/{attempt}", _program[os.getpid()])
    store = serve(bind(own_address(place), None), timeout) if place.rank == 0 else None
    try:
        if store is not None:
            program.set(f"run/{key}", f"{store.host} {store.port}")
        address, port = program.get(f"run/{key}").decode().split()
    except DistNetworkError as error:
        lost = "the connection through which ranks meet is closed, as after a run that failed"
        raise TrainingError(
            f"rank {place.rank} cannot begin a run: {lost} ({error}). Fix: start the program again"
        ) from error
    except (DistError, RuntimeError) as error:
        raise TrainingError(
            f"rank {place.rank} waited {timeout.total_seconds():.0f} s for rank 0 to begin this run: {error}"
        ) from error
    if store is None:
        store = connect(address, int(port), timeout, place.rank)
    os.environ.update(
        MASTER_ADDR=store.host, MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True"
    )
    return store
