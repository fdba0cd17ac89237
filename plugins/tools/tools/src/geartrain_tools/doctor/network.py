"""The checks ``network`` and ``environment``: loopback, host names, ports, variables."""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from geartrain import UsageError
from geartrain.plugin_api import ClusterEnvironment, detect
from geartrain_tools.doctor.findings import Section

#: Timeout in seconds of a name server, and of a connection inside this machine.
_PATIENCE = 5.0
#: The variables that launchers set, and their meaning for geartrain.
LAUNCHER = {
    "RANK": "rank of this process; with LOCAL_RANK and WORLD_SIZE this process counts as launched",
    "WORLD_SIZE": "number of processes; with LOCAL_RANK this process counts as launched",
    "LOCAL_RANK": "rank within this node; with WORLD_SIZE this process counts as launched",
    "LOCAL_WORLD_SIZE": "number of processes on this node",
    "NODE_RANK": "rank of this node, if --num-nodes is above 1",
    "GROUP_RANK": "rank of this node; torchrun sets it",
    "MASTER_ADDR": "address of rank 0: used if this process is launched or --num-nodes is above 1",
    "MASTER_PORT": "port of rank 0: used if this process is launched or --num-nodes is above 1",
    ClusterEnvironment.started_by: (
        "PID of the rank that geartrain started: this process or an ancestor of it"
    ),
    "TORCHELASTIC_RUN_ID": "torchrun started this process",
    "SLURM_PROCID": "a SLURM task: inside srun this process counts as launched",
    "OMPI_COMM_WORLD_RANK": "Open MPI started this process",
    "PMI_RANK": "MPICH started this process",
    "JSM_NAMESPACE_RANK": "LSF started this process",
}
_SHOWN = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "GEARTRAIN_")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def network(section: Section) -> None:
    """Check how processes meet: on one node by loopback, on several nodes also by host name."""
    facts = section.facts
    facts["loopback"] = found = _connects(socket.AF_INET, "127.0.0.1")
    if found["error"] is not None:
        section.problem(
            f"127.0.0.1 cannot be used: {found['error']}. Processes of one node meet there",
            "bring the interface lo up (ip link set lo up), and open it in the firewall",
        )
    facts["loopback_ipv6"] = (
        _connects(socket.AF_INET6, "::1") if socket.has_ipv6 else {"port": None, "error": "no IPv6"}
    )
    _localhost(section)
    _hostname(section)
    facts["interfaces"] = (
        [name for _, name in socket.if_nameindex()] if hasattr(socket, "if_nameindex") else []
    )
    _launched(section)


def _connects(family: int, address: str) -> dict[str, Any]:
    """Bind an address of this machine, connect to it and send a byte.

    Returns:
        ``port``, which was free, and ``error``, ``None`` on success.
    """
    found: dict[str, Any] = {"port": None, "error": None}
    try:
        with (
            socket.socket(family, socket.SOCK_STREAM) as listener,
            socket.socket(family, socket.SOCK_STREAM) as client,
        ):
            for connection in (listener, client):
                connection.settimeout(_PATIENCE)
            listener.bind((address, 0))
            listener.listen(1)
            found["port"] = listener.getsockname()[1]
            client.connect(listener.getsockname())
            accepted, _ = listener.accept()
            with accepted:
                accepted.settimeout(_PATIENCE)
                client.sendall(b"?")
                if accepted.recv(1) != b"?":
                    found["error"] = "data that is sent does not arrive"
    except OSError as error:
        found["error"] = error.strerror or str(error)
    return found


def _localhost(section: Section) -> None:
    found = section.facts["localhost"] = _addresses("localhost")
    if isinstance(found, str):
        section.problem(
            f"the name localhost does not resolve: {found}",
            "add the line '127.0.0.1 localhost' to /etc/hosts",
        )
    elif not all(ipaddress.ip_address(address).is_loopback for address in found):
        section.problem(
            f"the name localhost resolves to {', '.join(found)}, not to loopback",
            "add the line '127.0.0.1 localhost' to /etc/hosts",
        )


def _hostname(section: Section) -> None:
    name = section.facts["hostname"] = socket.gethostname()
    found = section.facts["hostname_addresses"] = _addresses(name)
    if isinstance(found, str):
        too_long = any(len(label) > 63 for label in name.split("."))  # Linux allows 64
        long = "choose another name, with at most 63 characters between its dots"
        section.warn(
            f"this machine's name, {name}, does not resolve: {found}. Several nodes need it",
            long if too_long else f"add {name} to /etc/hosts",
        )


def _addresses(name: str) -> list[str] | str:
    """Return the addresses of a host name, or the reason why it has none."""

    def ask() -> list[str]:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(there[0]).partition("%")[0] for *_, there in found))

    return _soon(ask)


def _soon(ask: Callable[[], list[str]]) -> list[str] | str:
    """Return ``ask()``, or a text after a timeout: a silent name server can block for minutes."""
    answer: list[Any] = [f"no answer within {_PATIENCE:g} s"]

    def work() -> None:
        try:
            answer[0] = ask()
        except (OSError, UnicodeError) as error:  # UnicodeError: not a valid name, so no query
            answer[0] = getattr(error, "strerror", None) or str(error)

    thread = threading.Thread(target=work, name="geartrain-doctor-name", daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    found: list[str] | str = answer[0]
    return found


# --- environment ----------------------------------------------------------------------------------


def _launched(section: Section) -> None:
    """Check which launcher geartrain believes started this process."""
    section.facts["launcher"] = None
    section.facts["launcher_variables"] = {
        name: os.environ[name] for name in LAUNCHER if name in os.environ
    }
    try:
        place = detect()
    except UsageError as error:
        section.problem(f"the launcher's environment variables contradict each other: {error}")
        return
    if place is None:
        return
    section.facts["launcher"] = place.launcher
    by_hand = place.launcher == "environment"
    source = "the environment" if by_hand else place.launcher
    message = f"{source} says that this process is rank {place.rank} of {place.size}"
    unset = f"unset {' '.join(section.facts['launcher_variables'])}"
    if place.size == 1:
        return
    # Variables that were set by hand may be leftovers; then a run in one process hangs.
    if by_hand:
        section.problem(
            f"{message} (WORLD_SIZE and LOCAL_RANK are set): a run would wait for the other ranks",
            f"{unset}, or start all ranks",
        )
    else:
        section.warn(
            f"{message}: a run here joins the other ranks and starts none",
            f"{unset}, if no launcher started this process",
        )


def environment(section: Section) -> None:
    """List the variables that configure torch, NCCL, gloo and geartrain, and no others."""
    names = [name for name in sorted(os.environ) if name in _SHOWN or name.startswith(_PREFIXES)]
    section.facts["variables"] = {
        name: "(hidden)" if any(word in name for word in _SECRET) else os.environ[name]
        for name in names
    }
