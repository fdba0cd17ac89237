"""The accelerator mps: the GPU of a Mac."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from geartrain import Module, Plan, Run, hookimpl
from geartrain_mps import limits

_MIB = 2**20


class MPSAccelerator:
    """Accelerator ``mps``: the GPU of a Mac, through torch's MPS backend. It has one device."""

    #: Below cuda, above the cpu.
    priority = 20

    # --- called before any run exists -------------------------------------------------------------

    @staticmethod
    def unavailable() -> str | None:
        """Return why MPS cannot be used here (torch, macOS or no Metal device), or ``None``."""
        if not torch.backends.mps.is_built():
            return (
                f"torch {torch.__version__} was built without MPS, which only its builds for macOS "
                "on Apple silicon have"
            )
        if torch.backends.mps.is_available():
            return None
        version = platform.mac_ver()[0]
        if _is_too_old(version):
            return (
                f"macOS {version} is too old. "
                "Fix: macOS 14 or newer, which torch needs (macOS 13 for older versions of torch)"
            )
        return (
            f"torch finds no Metal device on macOS {version or '(of unknown version)'}: virtual "
            "machines and sandboxes may have none"
        )

    @staticmethod
    def device_count() -> int:
        """Return 1 if MPS can be used, otherwise 0."""
        return int(torch.backends.mps.is_built() and torch.backends.mps.is_available())

    @staticmethod
    def diagnose() -> dict[str, Any]:
        """Return the report for ``geartrain doctor``; never raise.

        Returns:
            ``facts`` by name; ``devices`` with ``index``, ``name``, ``cores``, ``memory_used_mib``
            (by this process) and ``memory_total_mib`` (Metal's recommended maximum); ``problems``,
            each with its fix.
        """
        facts = {
            "torch built with MPS": torch.backends.mps.is_built(),
            "macOS": platform.mac_ver()[0] or "no",
        } | limits.environment()
        try:
            reason = MPSAccelerator.unavailable()
        except Exception as error:
            reason = f"torch failed in its check of MPS: {type(error).__name__}: {error}"
        problems = (
            []
            if reason is None
            else [reason if "Fix: " in reason else f"{reason}. Fix: --accelerator cpu"]
        )
        return {"facts": facts, "devices": [] if reason else [_describe()], "problems": problems}

    # --- before anything starts -------------------------------------------------------------------

    @hookimpl
    def check_plan(self, plan: Plan, module: Module | type[Module]) -> None:
        limits.refuse(plan, module)

    # --- in the process of a run ------------------------------------------------------------------

    @hookimpl
    def setup_device(self) -> torch.device:
        # With the index, as in tensor.device, so that run.device == tensor.device.
        return torch.device("mps", 0)

    @hookimpl
    def device_batches(self, run: Run, loader: Iterable[Any]) -> Iterator[Any]:
        return map(partial(limits.to_device, run), loader)

    @hookimpl
    def device_stats(self) -> dict[str, float]:
        # Both calls read a counter of torch's allocator or of Metal, without a wait for the device.
        return {
            "gpu0_memory_used_mib": torch.mps.driver_allocated_memory() / _MIB,
            "gpu0_memory_allocated_mib": torch.mps.current_allocated_memory() / _MIB,
        }

    @hookimpl
    def teardown_device(self) -> None:
        if self.device_count():  # teardown also runs if set-up found no device
            torch.mps.empty_cache()


def _is_too_old(version: str) -> bool:
    """True if macOS is too old for MPS in newer versions of torch, which dropped macOS 13.

    A Python that was built for an old macOS reads 10.16 on every newer one.
    """
    major = version.partition(".")[0]
    return version != "10.16" and major.isdigit() and int(major) < 14


def _describe() -> Mapping[str, Any]:
    device: dict[str, Any] = {"index": 0, "name": "Apple GPU"}
    asked: dict[str, Callable[[], Any]] = {
        # get_name and get_core_count are newer than torch 2.4.
        "name": lambda: torch.backends.mps.get_name(),
        "cores": lambda: torch.backends.mps.get_core_count(),
        "memory_used_mib": lambda: torch.mps.driver_allocated_memory() / _MIB,
        "memory_total_mib": lambda: torch.mps.recommended_max_memory() / _MIB,
    }
    for name, ask in asked.items():
        with contextlib.suppress(Exception):  # the diagnosis must show the other facts
            device[name] = ask()
    return device
