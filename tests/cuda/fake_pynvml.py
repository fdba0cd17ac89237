"""Stands where ``pynvml`` does, for GPUs that are not here: the real one's constants, errors and signatures, invented figures.

A handle must be used while the NVML that gave it is open, and in the process that opened it; anything else fails the test.
"""

import itertools
import os
import types
from dataclasses import dataclass, field

import pynvml as real

MIB = 2**20


@dataclass
class FakeGPU:
    uuid: str
    name: str = "NVIDIA H200"
    #: (pid, bytes or None)
    processes: list = field(default_factory=list)
    mode: int = real.NVML_COMPUTEMODE_DEFAULT
    #: MIG instances, or None where MIG is off.
    instances: list | None = None
    #: A MIG instance's place.
    gi: int = 0
    ci: int = 0
    used: int = 1000 * MIB
    total: int = 143771 * MIB
    capability: tuple = (9, 0)
    clock_reasons: int = 0
    ecc: tuple = (0, 0)
    #: KiB over all NVLinks at each reading: (sent, received); None where there are no links.
    links: object = None
    #: function -> NVML error code that it answers with.
    errors: dict = field(default_factory=dict)


@dataclass(eq=False)
class Handle:
    gpu: FakeGPU
    opened: int
    pid: int


class FakeNVML(types.ModuleType):
    """The module, with ``gpus`` in the order of PCI addresses."""

    def __init__(self, *gpus, driver="580.65.06", cuda=13000, names=None, error=None, errors=None):
        super().__init__("pynvml")
        for name, value in vars(real).items():
            if name.startswith(("NVML_", "NVMLError", "nvmlMemory_v", "nvmlClocks")):
                setattr(self, name, value)
        self.gpus, self.driver, self.cuda, self.names = list(gpus), driver, cuda, names or {}
        #: What nvmlInit answers with, and what other functions of the whole system do.
        self.error, self.errors = error, errors or {}
        self.opened = self.depth = 0
        #: Every function that was called.
        self.calls = []

    # --- what every function does ----------------------------------------------------------------------------------------

    def _system(self, function):
        self.calls.append(function)
        assert self.depth > 0, f"{function} without nvmlInit"
        if function in self.errors:
            raise real.NVMLError(self.errors[function])

    def _gpu(self, function, handle):
        self._system(function)
        assert isinstance(handle, Handle), f"{function}({handle!r})"
        assert handle.opened == self.opened, f"{function}: a handle of a session that is closed"
        assert handle.pid == os.getpid(), (
            f"{function}: a handle of the process that this one was forked from"
        )
        if function in handle.gpu.errors:
            raise real.NVMLError(handle.gpu.errors[function])
        return handle.gpu

    def _handle(self, gpu):
        return Handle(gpu, self.opened, os.getpid())

    # --- the system ------------------------------------------------------------------------------------------------------

    def nvmlInit(self):
        if self.error is not None:
            raise real.NVMLError(self.error)
        self.opened += self.depth == 0
        self.depth += 1

    def nvmlShutdown(self):
        assert self.depth > 0
        self.depth -= 1

    def nvmlSystemGetDriverVersion(self):
        self._system("nvmlSystemGetDriverVersion")
        return self.driver

    def nvmlSystemGetCudaDriverVersion(self):
        self._system("nvmlSystemGetCudaDriverVersion")
        return self.cuda

    def nvmlSystemGetProcessName(self, pid):
        self._system("nvmlSystemGetProcessName")
        if pid not in self.names:
            raise real.NVMLError(real.NVML_ERROR_NOT_FOUND)
        return self.names[pid]

    def nvmlDeviceGetCount(self):
        self._system("nvmlDeviceGetCount")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        self._system("nvmlDeviceGetHandleByIndex")
        gpu = self.gpus[index]
        if "nvmlDeviceGetHandleByIndex" in gpu.errors:
            raise real.NVMLError(gpu.errors["nvmlDeviceGetHandleByIndex"])
        return self._handle(gpu)

    # --- one GPU ---------------------------------------------------------------------------------------------------------

    def nvmlDeviceGetUUID(self, handle):
        return self._gpu("nvmlDeviceGetUUID", handle).uuid

    def nvmlDeviceGetName(self, handle):
        return self._gpu("nvmlDeviceGetName", handle).name

    def nvmlDeviceGetMemoryInfo(self, handle, version=None):
        gpu = self._gpu("nvmlDeviceGetMemoryInfo", handle)
        if version and "v2" in gpu.errors:
            raise real.NVMLError(gpu.errors["v2"])
        # As NVML has it: without a version, what the driver keeps for itself counts as used.
        used = gpu.used if version else gpu.used + 500 * MIB
        return types.SimpleNamespace(total=gpu.total, used=used, free=gpu.total - used)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        gpu = self._gpu("nvmlDeviceGetComputeRunningProcesses", handle)
        return [
            types.SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in gpu.processes
        ]

    def nvmlDeviceGetComputeMode(self, handle):
        return self._gpu("nvmlDeviceGetComputeMode", handle).mode

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return self._gpu("nvmlDeviceGetCudaComputeCapability", handle).capability

    def nvmlDeviceGetUtilizationRates(self, handle):
        self._gpu("nvmlDeviceGetUtilizationRates", handle)
        return types.SimpleNamespace(gpu=97, memory=41)

    def nvmlDeviceGetTemperature(self, handle, sensor):
        self._gpu("nvmlDeviceGetTemperature", handle)
        assert sensor == real.NVML_TEMPERATURE_GPU
        return 61

    def nvmlDeviceGetPowerUsage(self, handle):
        self._gpu("nvmlDeviceGetPowerUsage", handle)
        return 512_500

    def nvmlDeviceGetClockInfo(self, handle, type):
        self._gpu("nvmlDeviceGetClockInfo", handle)
        return {real.NVML_CLOCK_SM: 1980, real.NVML_CLOCK_MEM: 3201}[type]

    def nvmlDeviceGetPcieThroughput(self, device, counter):
        self._gpu("nvmlDeviceGetPcieThroughput", device)
        return {real.NVML_PCIE_UTIL_TX_BYTES: 2048, real.NVML_PCIE_UTIL_RX_BYTES: 4096}[counter]

    def nvmlDeviceGetTotalEccErrors(self, handle, errorType, counterType):
        gpu = self._gpu("nvmlDeviceGetTotalEccErrors", handle)
        assert counterType == real.NVML_VOLATILE_ECC
        return gpu.ecc[errorType]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return self._gpu("nvmlDeviceGetCurrentClocksEventReasons", handle).clock_reasons

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return self._gpu("nvmlDeviceGetCurrentClocksThrottleReasons", handle).clock_reasons

    def nvmlDeviceGetFieldValues(self, handle, fieldIds):
        gpu = self._gpu("nvmlDeviceGetFieldValues", handle)
        order = [
            real.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
            real.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
        ]
        if gpu.links is not None and isinstance(gpu.links, list):
            gpu.links = itertools.chain(gpu.links)
        now = None if gpu.links is None else next(gpu.links)
        values = (real.c_nvmlFieldValue_t * len(fieldIds))()
        for value, (name, scope) in zip(values, fieldIds, strict=True):
            assert scope == 0xFFFFFFFF
            value.fieldId, value.nvmlReturn = (
                name,
                real.NVML_SUCCESS if now else real.NVML_ERROR_NOT_SUPPORTED,
            )
            if now:
                value.value.ullVal = now[order.index(name)]
        return values

    # --- MIG -------------------------------------------------------------------------------------------------------------

    def nvmlDeviceGetMigMode(self, device):
        gpu = self._gpu("nvmlDeviceGetMigMode", device)
        on = real.NVML_DEVICE_MIG_DISABLE if gpu.instances is None else real.NVML_DEVICE_MIG_ENABLE
        return [on, on]

    def nvmlDeviceGetMaxMigDeviceCount(self, device):
        self._gpu("nvmlDeviceGetMaxMigDeviceCount", device)
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device, index):
        gpu = self._gpu("nvmlDeviceGetMigDeviceHandleByIndex", device)
        if index >= len(gpu.instances) or gpu.instances[index] is None:
            raise real.NVMLError(real.NVML_ERROR_NOT_FOUND)
        return self._handle(gpu.instances[index])

    def nvmlDeviceGetGpuInstanceId(self, device):
        return self._gpu("nvmlDeviceGetGpuInstanceId", device).gi

    def nvmlDeviceGetComputeInstanceId(self, device):
        return self._gpu("nvmlDeviceGetComputeInstanceId", device).ci


def functions(module):
    """The NVML functions of a module, fake or real."""
    return {
        name for name in dir(module) if name.startswith("nvml") and callable(getattr(module, name))
    }
