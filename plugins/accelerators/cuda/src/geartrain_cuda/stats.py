"""Figures of the GPUs from NVML, for the hook ``device_stats``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from geartrain import Run
from geartrain_cuda.nvml import GPU, MIB, Unavailable, session
from geartrain_cuda.visible import view

#: Scope of a field: the sum over all NVLinks.
_ALL_LINKS = 0xFFFFFFFF
#: Groups of reasons for reduced clocks. Every sample has all groups, 0 or 1, so names do not
#: change.
_REASONS = {
    "thermal": ("nvmlClocksEventReasonSwThermalSlowdown", "nvmlClocksEventReasonHwThermalSlowdown"),
    "power": ("nvmlClocksEventReasonSwPowerCap", "nvmlClocksEventReasonHwPowerBrakeSlowdown"),
    "hw_slowdown": ("nvmlClocksEventReasonHwSlowdown",),
}


class Stats:
    """Samples figures. Keeps the last counters of NVLink, because a rate needs two values."""

    def __init__(self) -> None:
        #: Index -> (seconds, KiB sent, KiB received).
        self._links: dict[int, tuple[float, float, float]] = {}

    def sample(self, run: Run) -> dict[str, float] | None:
        """Return the figures of this node's GPUs in the plan, such as ``gpu0_temperature_celsius``.

        Figures that NVML does not know are missing. This does not wait for the GPU. Each GPU takes
        about 40 ms, in which NVML measures the traffic on PCIe.

        Returns:
            Name -> value; ``None`` except on local rank 0.
        """
        if run.world.local_rank != 0:
            return None
        figures: dict[str, float] = {}
        if torch.version.hip is None:
            try:
                with session() as nvml:
                    seen = view(nvml)
                    seen.warn()
                    for index in run.plan.devices:
                        if index < len(seen.devices):
                            figures |= _named(index, self._of(index, seen.devices[index]))
            except Unavailable:
                pass
        # Only this process's GPUs: torch does not know the memory of other processes.
        for index in run.plan.devices[: run.plan.layout.devices_per_process]:
            allocated = torch.cuda.memory_allocated(torch.device("cuda", index)) / MIB
            reserved = torch.cuda.memory_reserved(torch.device("cuda", index)) / MIB
            memory = {"torch_allocated_mib": allocated, "torch_reserved_mib": reserved}
            figures |= _named(index, memory)
        return figures

    def _of(self, index: int, gpu: GPU) -> dict[str, float]:
        links = _links(gpu)
        figures = _figures(gpu)
        before = self._links.get(index, links)
        current = _links(gpu)
        if before is not None and current is not None and current[0] > before[0]:
            self._links[index] = current
            seconds = current[0] - before[0]
            # After a reset, counters start again at 0: the rate must not be negative.
            figures["nvlink_tx_mib_per_s"] = max(0.0, current[1] - before[1]) / 1024 / seconds
            figures["nvlink_rx_mib_per_s"] = max(0.0, current[2] - before[2]) / 1024 / seconds
        return figures


def _named(index: int, figures: dict[str, float]) -> dict[str, float]:
    return {f"gpu{index}_{name}": float(value) for name, value in figures.items()}


def _figures(gpu: GPU) -> dict[str, float]:
    # Some figures exist only for the whole board, not for a MIG instance.
    board, constant = gpu.parent or gpu, gpu.constant
    use, memory = gpu.ask("nvmlDeviceGetUtilizationRates"), gpu.memory()
    figures: dict[str, Callable[[], float | None]] = {
        "utilization_percent": lambda: None if use is None else use.gpu,
        "memory_utilization_percent": lambda: None if use is None else use.memory,
        "memory_used_mib": lambda: None if memory is None else memory[0],
        "memory_total_mib": lambda: None if memory is None else memory[1],
        "temperature_celsius": lambda: board.ask(
            "nvmlDeviceGetTemperature", constant("NVML_TEMPERATURE_GPU")
        ),
        "power_watt": lambda: _scaled(board.ask("nvmlDeviceGetPowerUsage"), 1000),
        "sm_clock_mhz": lambda: board.ask("nvmlDeviceGetClockInfo", constant("NVML_CLOCK_SM")),
        "memory_clock_mhz": lambda: board.ask("nvmlDeviceGetClockInfo", constant("NVML_CLOCK_MEM")),
        "pcie_tx_mib_per_s": lambda: _scaled(
            board.ask("nvmlDeviceGetPcieThroughput", constant("NVML_PCIE_UTIL_TX_BYTES")), 1024
        ),
        "pcie_rx_mib_per_s": lambda: _scaled(
            board.ask("nvmlDeviceGetPcieThroughput", constant("NVML_PCIE_UTIL_RX_BYTES")), 1024
        ),
        "ecc_corrected_errors": lambda: _ecc(board, "NVML_MEMORY_ERROR_TYPE_CORRECTED"),
        "ecc_uncorrected_errors": lambda: _ecc(board, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED"),
    }
    asked = {name: figure() for name, figure in figures.items()}
    return {name: value for name, value in asked.items() if value is not None} | throttles(board)


def _ecc(gpu: GPU, kind: str) -> float | None:
    """Return the number of memory errors since the driver was loaded."""
    count: float | None = gpu.ask(
        "nvmlDeviceGetTotalEccErrors", gpu.constant(kind), gpu.constant("NVML_VOLATILE_ECC")
    )
    return count


def throttles(gpu: GPU) -> dict[str, float]:
    """Return ``throttled`` and a flag for each group of reasons, 0 or 1; empty if NVML fails."""
    active = gpu.ask("nvmlDeviceGetCurrentClocksEventReasons")
    if active is None:  # the function's name in drivers before 535
        active = gpu.ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    if active is None:
        return {}
    flags = {
        f"throttled_{group}": float(any(active & gpu.constant(bit) for bit in bits))
        for group, bits in _REASONS.items()
    }
    return {"throttled": max(flags.values()), **flags}


def _links(gpu: GPU) -> tuple[float, float, float] | None:
    """Return (seconds, KiB sent, KiB received) of all NVLinks since the driver was loaded.

    ``None`` if the GPU has no NVLink.
    """
    names = ("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX")
    values: Any = gpu.ask(
        "nvmlDeviceGetFieldValues", [(gpu.constant(name), _ALL_LINKS) for name in names]
    )
    if values is None or any(value.nvmlReturn != gpu.constant("NVML_SUCCESS") for value in values):
        return None
    return time.monotonic(), float(values[0].value.ullVal), float(values[1].value.ullVal)


def _scaled(value: float | None, divisor: float) -> float | None:
    return None if value is None else value / divisor
