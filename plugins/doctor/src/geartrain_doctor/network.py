"""``geartrain doctor``: loopback, names, ports, and the variables of the environment that decide how processes meet."""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from geartrain import UsageError
from geartrain.plugin_api import STARTED_BY, detect
from geartrain_doctor.findings import Section

#: Seconds for a name server to answer, and for a connection within this machine.
_PATIENCE = 5.0
#: What launchers set, and what it means to geartrain.
LAUNCHER = {
    "RANK": "which process this is; with LOCAL_RANK and WORLD_SIZE this process counts as launched",
    "WORLD_SIZE": "how many processes there are; with LOCAL_RANK this process counts as launched",
    "LOCAL_RANK": "which process of this node this is; with WORLD_SIZE this process counts as launched",
    "LOCAL_WORLD_SIZE": "how many processes this node has",
    "NODE_RANK": "which node this is, where --num-nodes is above 1",
    "GROUP_RANK": "which node this is; torchrun sets it",
    "MASTER_ADDR": "where rank 0 is: used when this process is launched, or --num-nodes is above 1",
    "MASTER_PORT": "where rank 0 listens: used when this process is launched, or --num-nodes is above 1",
    STARTED_BY: "the process of geartrain's that this one, or a process above it, is",
    "TORCHELASTIC_RUN_ID": "torchrun started this process",
    "SLURM_PROCID": "a task of SLURM's: within srun this process counts as launched",
    "OMPI_COMM_WORLD_RANK": "Open MPI started this process",
    "PMI_RANK": "MPICH started this process",
    "JSM_NAMESPACE_RANK": "LSF started this process",
}
_SHOWN = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "GEARTRAIN_")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def network(section: Section) -> None:
    """What processes of one node need to meet, and what several nodes need besides."""
    facts = section.facts
    facts["loopback"] = found = _connects(socket.AF_INET, "127.0.0.1")
    if found["error"] is not None:
        section.problem(
            f"127.0.0.1 cannot be used: {found['error']}. Processes of one node meet there",
            "bring the interface lo up (ip link set lo up), and let no firewall close it",
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
        ``port``, one that was free, and ``error``, which is ``None`` where it worked.
    """
    found: dict[str, Any] = {"port": None, "error": None}
    try:
        with (
            socket.socket(family, socket.SOCK_STREAM) as listener,
            socket.socket(family, socket.SOCK_STREAM) as client,
        ):
            for one in (listener, client):
                one.settimeout(_PATIENCE)
            listener.bind((address, 0))
            listener.listen(1)
            found["port"] = listener.getsockname()[1]
            client.connect(listener.getsockname())
            accepted, _ = listener.accept()
            with accepted:
                accepted.settimeout(_PATIENCE)
                client.sendall(b"?")
                if accepted.recv(1) != b"?":
                    found["error"] = "what is sent does not arrive"
    except OSError as error:
        found["error"] = error.strerror or str(error)
    return found


def _localhost(section: Section) -> None:
    found = section.facts["localhost"] = _addresses("localhost")
    if isinstance(found, str):
        section.problem(
            f"the name localhost is not known: {found}",
            "a line '127.0.0.1 localhost' in /etc/hosts",
        )
    elif not all(ipaddress.ip_address(address).is_loopback for address in found):
        section.problem(
            f"the name localhost leads to {', '.join(found)}, not to loopback",
            "a line '127.0.0.1 localhost' in /etc/hosts",
        )


def _hostname(section: Section) -> None:
    name = section.facts["hostname"] = socket.gethostname()
    found = section.facts["hostname_addresses"] = _addresses(name)
    if isinstance(found, str):
        too_long = any(len(label) > 63 for label in name.split("."))  # Linux allows 64
        fix = (
            "another name: between its dots there may be at most 63 letters"
            if too_long
            else f"{name} in /etc/hosts"
        )
        section.warn(
            f"this machine's name, {name}, is not known: {found}. One node does not need it, several do",
            fix,
        )


def _addresses(name: str) -> list[str] | str:
    """The addresses of a host's name, or why there are none."""

    def ask() -> list[str]:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(there[0]).partition("%")[0] for *_, there in found))

    return _soon(ask)


def _soon(ask: Callable[[], list[str]]) -> list[str] | str:
    """What ``ask`` returns; a name server that does not answer can take minutes, and cannot be interrupted."""
    answer: list[Any] = [f"no answer within {_PATIENCE:g} s"]

    def work() -> None:
        try:
            answer[0] = ask()
        except (
            OSError,
            UnicodeError,
        ) as error:  # UnicodeError: it can be no name, and nobody was asked
            answer[0] = getattr(error, "strerror", None) or str(error)

    thread = threading.Thread(target=work, name="geartrain-doctor-name", daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    found: list[str] | str = answer[0]
    return found


# --- environment ---------------------------------------------------------------------------------------------------------


def _launched(section: Section) -> None:
    """Who geartrain believes to have started this process."""
    section.facts["launcher"] = None
    section.facts["launcher_variables"] = {
        name: os.environ[name] for name in LAUNCHER if name in os.environ
    }
    try:
        place = detect()
    except UsageError as error:
        section.problem(
            f"the environment says that this process was launched, and contradicts itself: {error}"
        )
        return
    if place is None:
        return
    section.facts["launcher"] = place.launcher
    by_hand = place.launcher == "environment"
    what = f"{'the environment' if by_hand else place.launcher} says that this process is rank {place.rank} of {place.size}"
    unset = f"unset {' '.join(section.facts['launcher_variables'])}"
    if place.size == 1:
        return
    if by_hand:  # left by hand, or meant; a program that is started by hand in one process hangs
        section.problem(
            f"{what} (WORLD_SIZE and LOCAL_RANK are set): a run would wait for the others",
            f"{unset}, or start them all",
        )
    else:
        section.warn(
            f"{what}: a run here joins the others and starts none",
            f"{unset}, if nothing launched this",
        )


def environment(section: Section) -> None:
    """Variables that change what torch, NCCL, gloo and geartrain do; of no other the value is shown."""
    names = [name for name in sorted(os.environ) if name in _SHOWN or name.startswith(_PREFIXES)]
    section.facts["variables"] = {
        name: "(hidden)" if any(word in name for word in _SECRET) else os.environ[name]
        for name in names
    }
