"""The stores through which ranks meet: one for the program, and a new one for every run.

``TCPStore("127.0.0.1")`` listens on every interface, so rank 0 binds the socket and passes it on.
Each run has a new store, because a second process group in an old store may read keys of the first
one, after a second ``fit`` or a torchrun restart.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError, DistNetworkError

from geartrain import TrainingError
from geartrain.plugin_api import ClusterEnvironment
from geartrain_parallel import sealed
from geartrain_parallel.sockets import bind, own_address

#: Process id -> the program's store. A forked rank must connect again, and must not destroy the
#: store of its starter.
_program: dict[int, TCPStore] = {}


class SealedStore(Store):
    """A store from which ranks read only what a rank of the program has written.

    torch's C++, such as gloo, calls these methods, too, while this object exists.

    Args:
        store: with the values.
        prefix: of its keys.
    """

    def __init__(self, store: TCPStore, prefix: str = "") -> None:
        super().__init__()
        self._store, self._prefix, self.host, self.port = store, prefix, store.host, store.port

    def set(self, key: str, value: str | bytes) -> None:
        key, data = self._prefix + key, value.encode() if isinstance(value, str) else value
        self._store.set(key, sealed.seal(data, key))  # type: ignore[arg-type]  # it takes bytes

    def get(self, key: str) -> bytes:
        """Return the value of a key, once it is there.

        Raises:
            TrainingError: no rank of this program has written it.
        """
        return sealed.unseal(self._store.get(self._prefix + key), self._prefix + key)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write a value if the key has the expected one, or none if that is empty.

        Returns:
            The key's value now.

        Raises:
            TrainingError: no rank of this program has written it.
        """
        key = self._prefix + key
        pair = [sealed.seal(text.encode(), key) if text else b"" for text in (expected, desired)]
        return sealed.unseal(self._store.compare_set(key, *pair), key)  # type: ignore[arg-type]  # as set()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._prefix + key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check([self._prefix + key for key in keys])

    def wait(self, keys: Sequence[str], *timeout: timedelta) -> None:
        self._store.wait([self._prefix + key for key in keys], *timeout)

    def clone(self) -> SealedStore:
        """Return the same store with a connection of its own."""
        return SealedStore(self._store.clone(), self._prefix)  # type: ignore[attr-defined]


def serve(listener: socket.socket, timeout: timedelta) -> TCPStore:
    """Return a store on a bound socket, which then belongs to the store."""
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
        TrainingError: rank 0 does not answer within the timeout.
    """
    try:
        return TCPStore(address, port, None, False, timeout=timeout, wait_for_workers=False)
    except (DistError, RuntimeError, ValueError) as error:
        raise TrainingError(
            f"rank {rank} reached no rank 0 at {address}:{port} within "
            f"{timeout.total_seconds():.0f} s. Fix: set the same MASTER_ADDR and MASTER_PORT on "
            f"every node, reachable from all of them ({str(error).splitlines()[0]})"
        ) from error


def serve_program(address: str, port: int | None, timeout: timedelta) -> int:
    """Serve the store of this program, once, before other ranks start.

    Returns:
        Its port.

    Raises:
        TrainingError: the port is taken, or the address is not this machine's.
    """
    if os.getpid() not in _program:
        _program[os.getpid()] = serve(bind(address, port), timeout)
    return int(_program[os.getpid()].port)


def run_store(place: ClusterEnvironment, key: str, timeout: timedelta) -> TCPStore:
    """Return a new store for one run of this program.

    ``MASTER_ADDR`` and ``MASTER_PORT`` then name it, so that ranks meet there in
    ``torch.distributed.init_process_group("gloo")``.

    Args:
        place: this rank, and the address of the program's store.
        key: the run's name. It is unique in the program; otherwise a rank could read the address of
            another run's store.
        timeout: how long to wait for rank 0.

    Raises:
        TrainingError: rank 0 cannot be reached, or does not come; or an earlier run has failed,
            which closed the connection to the store.
    """
    assert place.master_addr is not None
    assert place.master_port is not None
    # torchrun's agents may keep the store during a restart, which counts as another program. The
    # count is each agent's own: with a new store it would separate an agent that has just joined.
    agents_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if agents_store else "0"
    if place.rank == 0 and not agents_store:
        serve_program(place.master_addr, place.master_port, timeout)
    elif os.getpid() not in _program:
        _program[os.getpid()] = connect(place.master_addr, place.master_port, timeout, place.rank)
    program = PrefixStore(f"geartrain/{attempt}", _program[os.getpid()])
    store = serve(bind(own_address(place), None), timeout) if place.rank == 0 else None
    try:
        if store is not None:
            told = sealed.seal(f"{store.host} {store.port}".encode(), key)
            program.set(f"run/{key}", told)  # type: ignore[arg-type]  # it takes bytes
        address, port = sealed.unseal(program.get(f"run/{key}"), key).decode().split()
    except DistNetworkError as error:
        lost = "the connection through which ranks meet is closed, as after a run that failed"
        raise TrainingError(
            f"rank {place.rank} cannot begin a run: {lost} ({error}). Fix: start the program again"
        ) from error
    except (DistError, RuntimeError) as error:
        raise TrainingError(
            f"rank {place.rank} waited {timeout.total_seconds():.0f} s for rank 0 to begin this "
            f"run: {error}"
        ) from error
    if store is None:
        store = connect(address, int(port), timeout, place.rank)
    os.environ.update(
        MASTER_ADDR=store.host, MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True"
    )
    return store
