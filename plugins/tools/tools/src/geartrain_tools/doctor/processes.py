"""The check ``all_reduce``: choose a backend and sum a vector over two processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from geartrain import UsageError
from geartrain_tools.doctor.findings import Section
from geartrain_tools.doctor.software import backends, has_torch

#: Device of a backend's tensors; CPU for all others.
_DEVICES = {"nccl": "cuda", "xccl": "xpu"}


def check_backend(given: str, chosen: Mapping[str, Any] | None, devices: int | None) -> None:
    """Raise if the ``--backend`` cannot be used.

    Args:
        given: name of a torch.distributed backend.
        chosen: the accelerator that a run would take, a row of
            :func:`geartrain_tools.doctor.software.accelerators`; ``None`` if there is none.
        devices: its number of devices.

    Raises:
        UsageError: this torch lacks the backend, or this machine lacks the devices that it needs.
    """
    try:
        have = backends()
    except Exception:  # no importable torch: the checks report it
        return
    if given not in have:
        hint = " or ".join(have) or "install a torch with torch.distributed"
        raise UsageError(f"--backend {given}: this torch does not have it. Fix: {hint}")
    if given == "nccl" and (chosen is None or chosen["name"] != "cuda" or (devices or 0) < 2):
        found = "no accelerator" if chosen is None else f"{devices} of {chosen['name']}"
        raise UsageError(
            f"--backend nccl needs two CUDA devices, but this machine has {found}. "
            "Fix: --backend gloo"
        )


def choose_backend(
    given: str | None, chosen: Mapping[str, Any] | None, devices: int | None
) -> tuple[str, str]:
    """Return the backend to use, and the reason. Arguments as for :func:`check_backend`."""
    if given is not None:
        return given, f"--backend {given}"
    if chosen is None:
        return "gloo", "no accelerator can be used"
    if chosen["name"] != "cuda":
        return "gloo", f"the accelerator is {chosen['name']}"
    if (devices or 0) < 2:
        return "gloo", f"nccl needs two GPUs, and this machine has {devices or 'none'}"
    if "nccl" not in backends():
        return "gloo", "this torch has no nccl"
    return "nccl", f"the accelerator is cuda, with {devices} devices"


def processes(
    section: Section, given: str | None, chosen: Mapping[str, Any] | None, devices: int | None
) -> None:
    """Run and time an all-reduce of two new processes. Arguments as for :func:`check_backend`.

    Skipped on Windows, which lacks the signals and pipes that watch and stop the two ranks.
    """
    facts = section.facts
    facts |= {"backend": None, "why": "torch is not installed", "error": None}
    if not has_torch():
        return
    if sys.platform == "win32":
        facts["why"] = "not tried on Windows"
        return
    backend, reason = choose_backend(given, chosen, devices)
    facts |= {"backend": backend, "why": reason}
    if backend not in backends():
        facts["error"] = f"this torch has no {backend}"
        section.problem(
            f"this torch has no {backend}, which processes of one node need to meet",
            "install a torch with torch.distributed",
        )
        return
    from geartrain_tools.doctor.all_reduce_check import all_reduce

    facts |= all_reduce(backend, _DEVICES.get(backend, "cpu"))
    if facts["error"] is not None:
        section.problem(
            f"an all-reduce of two processes on {backend} failed: {facts['error']}", _fix(backend)
        )


def _fix(backend: str) -> str:
    interface = f"{'NCCL' if backend == 'nccl' else 'GLOO'}_SOCKET_IFNAME"
    if interface in os.environ:
        return f"unset {interface} (it is {os.environ[interface]!r}) and try again"
    if backend == "nccl":
        return (
            "fix the cause that the error names; NCCL_DEBUG=INFO geartrain doctor --backend nccl "
            "shows more, and --strategy.process_group_backend gloo trains without nccl"
        )
    return (
        "fix the cause that the error names; geartrain doctor --json has the whole error and the "
        "output of both processes"
    )
