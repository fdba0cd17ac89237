"""``device_stats``: figures of the GPUs, from NVML."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from geartrain import Run
from geartrain_cuda.nvml import GPU, MIB, Unavailable, session
from geartrain_cuda.visible import view

#: In a field's scope: the sum over all NVLinks.
_ALL_LINKS = 0xFFFFFFFF
#: Why clocks are held down, in groups; each 0 or 1 in every sample, so that the names do not change from one to the next.
_REASONS = {
    "thermal": ("nvmlClocksEventReasonSwThermalSlowdown", "nvmlClocksEventReasonHwThermalSlowdown"),
    "power": ("nvmlClocksEventReasonSwPowerCap", "nvmlClocksEventReasonHwPowerBrakeSlowdown"),
    "hw_slowdown": ("nvmlClocksEventReasonHwSlowdown",),
}


class Stats:
    """Samples figures; keeps the counters of the sample before, because NVLink counts what it has carried."""

    def __init__(self) -> None:
        #: Index -> (seconds, KiB sent, KiB received).
        self._links: dict[int, tuple[float, float, float]] = {}

    def sample(self, run: Run) -> dict[str, float] | None:
        """The figures of this node's GPUs in the plan, ``gpu0_temperature_celsius`` and so on; ``None`` on all ranks of a node but one.

        A figure that NVML cannot say is left out. Waits for nothing on the GPU; each GPU takes about 40 ms, over which NVML measures the
        traffic on PCIe.
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
        for index in run.plan.devices[
            : run.plan.layout.devices_per_process
        ]:  # this process's own: torch knows its own memory alone
            device = torch.device("cuda", index)
            allocated, reserved = (
                torch.cuda.memory_allocated(device),
                torch.cuda.memory_reserved(device),
            )
            figures |= _named(
                index,
                {"torch_allocated_mib": allocated / MIB, "torch_reserved_mib": reserved / MIB},
            )
        return figures

    def _of(self, index: int, gpu: GPU) -> dict[str, float]:
        links = _links(gpu)
        figures = _figures(gpu)
        before = self._links.get(index, links)
        now = _links(gpu)
        if before is not None and now is not None and now[0] > before[0]:
            self._links[index] = now
            seconds = now[0] - before[0]
            # A counter that starts again from 0, as after a reset, gives no rate below 0.
            figures["nvlink_tx_mib_per_s"] = max(0.0, now[1] - before[1]) / 1024 / seconds
            figures["nvlink_rx_mib_per_s"] = max(0.0, now[2] - before[2]) / 1024 / seconds
        return figures


def _named(index: int, figures: dict[str, float]) -> dict[str, float]:
    return {f"gpu{index}_{name}": float(value) for name, value in figures.items()}


def _figures(gpu: GPU) -> dict[str, float]:
    # What belongs to the whole board, a MIG instance's included.
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
    """Errors since the driver was loaded."""
    count: float | None = gpu.ask(
        "nvmlDeviceGetTotalEccErrors", gpu.constant(kind), gpu.constant("NVML_VOLATILE_ECC")
    )
    return count


def throttles(gpu: GPU) -> dict[str, float]:
    """``throttled`` and one flag for each group of reasons, 0 or 1; empty where NVML cannot say."""
    active = gpu.ask("nvmlDeviceGetCurrentClocksEventReasons")
    if active is None:
        active = gpu.ask(
            "nvmlDeviceGetCurrentClocksThrottleReasons"
        )  # what drivers before 535 call it
    if active is None:
        return {}
    flags = {
        f"throttled_{group}": float(any(active & gpu.constant(bit) for bit in bits))
        for group, bits in _REASONS.items()
    }
    return {"throttled": max(flags.values()), **flags}


def _links(gpu: GPU) -> tuple[float, float, float] | None:
    """(seconds, KiB sent, KiB received) over all NVLinks since the driver was loaded; ``None`` where there are none."""
    names = ("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX")
    values: Any = gpu.ask(
        "nvmlDeviceGetFieldValues", [(gpu.constant(name), _ALL_LINKS) for name in names]
    )
    if values is None or any(value.nvmlReturn != gpu.constant("NVML_SUCCESS") for value in values):
        return None
    return time.monotonic(), float(values[0].value.ullVal), float(values[1].value.ullVal)


def _scaled(value: float | None, divisor: float) -> float | None:
    return None if value is None else value / divisor
