"""``geartrain doctor``: whether two processes can sum a vector here."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from geartrain import UsageError
from geartrain_doctor.findings import Section
from geartrain_doctor.software import backends, has_torch

#: Where a backend's tensors are; on the CPU for all others.
_DEVICES = {"nccl": "cuda", "xccl": "xpu"}


def check_backend(given: str, chosen: Mapping[str, Any] | None, devices: int | None) -> None:
    """Refuse a ``--backend`` that cannot be tried.

    Args:
        chosen: the accelerator that would be taken, as :func:`doctor_software.accelerators` says; ``None`` where none would.
        devices: how many devices it has.

    Raises:
        UsageError: it is none of this torch's, or needs devices that are not here.
    """
    try:
        have = backends()
    except Exception:  # no torch, or one that cannot be imported: the checks say so
        return
    if given not in have:
        raise UsageError(
            f"--backend {given}: this torch does not have it. Fix: {' or '.join(have) or 'a torch with torch.distributed'}"
        )
    if given == "nccl" and (chosen is None or chosen["name"] != "cuda" or (devices or 0) < 2):
        here = "no accelerator is" if chosen is None else f"{devices} of {chosen['name']} are"
        raise UsageError(
            f"--backend nccl needs two CUDA devices, and {here} here. Fix: --backend gloo"
        )


def choose_backend(
    given: str | None, chosen: Mapping[str, Any] | None, devices: int | None
) -> tuple[str, str]:
    """The backend to try, and why; the arguments are :func:`check_backend`'s."""
    if given is not None:
        return given, f"--backend {given}"
    if chosen is None:
        return "gloo", "no accelerator can serve"
    if chosen["name"] != "cuda":
        return "gloo", f"the accelerator is {chosen['name']}"
    if (devices or 0) < 2:
        return "gloo", f"nccl needs two GPUs, and {devices or 'none'} is here"
    if "nccl" not in backends():
        return "gloo", "this torch has no nccl"
    return "nccl", f"the accelerator is cuda, with {devices} devices"


def processes(
    section: Section, given: str | None, chosen: Mapping[str, Any] | None, devices: int | None
) -> None:
    """Two fresh processes, an all-reduce, and its time; the arguments are :func:`check_backend`'s.

    Not on Windows, which lacks the signals and the pipes by which the two are watched and ended.
    """
    facts = section.facts
    facts |= {"backend": None, "why": "torch is not installed", "error": None}
    if not has_torch():
        return
    if sys.platform == "win32":
        facts["why"] = "not tried on Windows"
        return
    backend, why = choose_backend(given, chosen, devices)
    facts |= {"backend": backend, "why": why}
    if backend not in backends():
        facts["error"] = f"this torch has no {backend}"
        section.problem(
            f"this torch has no {backend}, without which processes of one node cannot meet",
            "a torch with torch.distributed",
        )
        return
    from geartrain_doctor.all_reduce_check import all_reduce

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
        more = "NCCL_DEBUG=INFO geartrain doctor --backend nccl says more"
        return f"what the error names; {more}, and --strategy.process_group_backend gloo trains without nccl"
    return "what the error names; geartrain doctor --json has the whole error and both processes' output"
