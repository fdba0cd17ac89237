"""A fake ``pynvml`` with the real constants, errors and signatures, and invented figures.

A test fails if it uses a handle after its session, or in another process than the handle's.
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
    #: MIG instances, or None if MIG is off.
    instances: list | None = None
    #: The place of a MIG instance.
    gi: int = 0
    ci: int = 0
    used: int = 1000 * MIB
    total: int = 143771 * MIB
    capability: tuple = (9, 0)
    clock_reasons: int = 0
    ecc: tuple = (0, 0)
    #: KiB over all NVLinks at each reading: (sent, received); None without NVLink.
    links: object = None
    #: function -> the NVML error code that it raises.
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
        #: The error code of nvmlInit, and those of other functions for the whole system.
        self.error, self.errors = error, errors or {}
        self.opened = self.depth = 0
        #: All calls of functions.
        self.calls = []

    # --- parts of every function ------------------------------------------------------------------

    def _system(self, function):
        self.calls.append(function)
        assert self.depth > 0, f"{function} without nvmlInit"
        if function in self.errors:
            raise real.NVMLError(self.errors[function])

    def _gpu(self, function, handle):
        self._system(function)
        assert isinstance(handle, Handle), f"{function}({handle!r})"
        assert handle.opened == self.opened, f"{function}: a handle of a closed session"
        assert handle.pid == os.getpid(), f"{function}: a handle of the parent of this process"
        if function in handle.gpu.errors:
            raise real.NVMLError(handle.gpu.errors[function])
        return handle.gpu

    def _handle(self, gpu):
        return Handle(gpu, self.opened, os.getpid())

    # --- the system -------------------------------------------------------------------------------

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

    # --- one GPU ----------------------------------------------------------------------------------

    def nvmlDeviceGetUUID(self, handle):
        return self._gpu("nvmlDeviceGetUUID", handle).uuid

    def nvmlDeviceGetName(self, handle):
        return self._gpu("nvmlDeviceGetName", handle).name

    def nvmlDeviceGetMemoryInfo(self, handle, version=None):
        gpu = self._gpu("nvmlDeviceGetMemoryInfo", handle)
        if version and "v2" in gpu.errors:
            raise real.NVMLError(gpu.errors["v2"])
        # As in NVML: without a version, ``used`` includes the driver's reserved memory.
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
        prefix = "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_"
        order = [getattr(real, prefix + way) for way in ("TX", "RX")]
        if gpu.links is not None and isinstance(gpu.links, list):
            gpu.links = itertools.chain(gpu.links)
        now = None if gpu.links is None else next(gpu.links)
        values = (real.c_nvmlFieldValue_t * len(fieldIds))()
        for value, (name, scope) in zip(values, fieldIds, strict=True):
            assert scope == 0xFFFFFFFF
            value.fieldId = name
            value.nvmlReturn = real.NVML_SUCCESS if now else real.NVML_ERROR_NOT_SUPPORTED
            if now:
                value.value.ullVal = now[order.index(name)]
        return values

    # --- MIG --------------------------------------------------------------------------------------

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
    """Return the names of NVML functions of a module, fake or real."""
    return {
        name for name in dir(module) if name.startswith("nvml") and callable(getattr(module, name))
    }
