"""Query this machine's GPUs through NVML, without a CUDA context.

NVML is opened for each query and closed after it. nvmlInit counts its callers, so sessions may
overlap. A process that forks between two queries, as for its loader's workers, passes no open NVML
and no handle to its children. https://docs.nvidia.com/deploy/nvml-api/
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

MIB = 2**20


class Unavailable(Exception):
    """Raised if NVML cannot be used here; the text is the reason, for the user."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process on a GPU."""

    pid: int
    #: ``None`` if NVML does not know it: the process is another user's, or has ended.
    name: str | None
    memory_mib: int | None

    def __str__(self) -> str:
        memory = "" if self.memory_mib is None else f", {self.memory_mib} MiB"
        return f"pid {self.pid} {self.name or '(name unknown)'}{memory}"


class GPU:
    """One GPU, or one MIG instance of a GPU, while its session is open."""

    def __init__(
        self,
        session: Session,
        index: int,
        handle: Any,
        parent: GPU | None = None,
        error: str | None = None,
    ) -> None:
        self._session, self._handle = session, handle
        #: The number that nvidia-smi shows; for a MIG instance, its number on the GPU.
        self.index = index
        #: The GPU of a MIG instance.
        self.parent = parent
        #: The reason why NVML knows nothing about it, such as ``"GPU is lost"``.
        self.error = error
        self.uuid: str | None = self.ask("nvmlDeviceGetUUID")
        self.name: str | None = self.ask("nvmlDeviceGetName")

    @property
    def label(self) -> str:
        """The GPU's name in errors."""
        if self.parent is not None:
            return f"MIG instance {self.index} of {self.parent.label}"
        return f"GPU {self.index} ({self.name or 'name unknown'})"

    def ask(self, function: str, *arguments: Any, **more: Any) -> Any:
        """Return the result of a function of NVML for this GPU, or ``None`` if NVML fails."""
        if self._handle is None:
            return None
        try:
            return self._session.call(function, self._handle, *arguments, **more)
        except self._session.lost as error:
            self.error = str(error)
        except (self._session.error, UnicodeDecodeError):
            pass
        return None

    def constant(self, name: str) -> Any:
        return self._session.constant(name)

    def processes(self) -> list[Process] | None:
        """Return the processes with a compute context; ``None`` if NVML does not know them.

        Processes that use the GPU only for graphics, such as displays, are not included.
        """
        found = self.ask("nvmlDeviceGetComputeRunningProcesses")
        if found is None:
            return None
        name_of = partial(self._session.ask, "nvmlSystemGetProcessName")
        return [Process(p.pid, name_of(p.pid), _mib(p.usedGpuMemory)) for p in found]

    def compute_mode(self) -> str | None:
        """Return ``"default"``, ``"exclusive_process"``, ``"prohibited"`` or ``None`` (unknown)."""
        mode = (self.parent or self).ask("nvmlDeviceGetComputeMode")
        names = {
            "NVML_COMPUTEMODE_DEFAULT": "default",
            "NVML_COMPUTEMODE_PROHIBITED": "prohibited",
            "NVML_COMPUTEMODE_EXCLUSIVE_PROCESS": "exclusive_process",
            "NVML_COMPUTEMODE_EXCLUSIVE_THREAD": "exclusive_process",  # of old drivers
        }
        return next((word for name, word in names.items() if mode == self.constant(name)), None)

    def memory(self) -> tuple[int, int] | None:
        """Return (used, total) in MiB.

        ``used`` does not include the driver's reserved memory, unless the driver is too old to know
        it.
        """
        version = self.constant("nvmlMemory_v2")
        found = self.ask("nvmlDeviceGetMemoryInfo", version=version)
        found = found or self.ask("nvmlDeviceGetMemoryInfo")
        return None if found is None else (found.used // MIB, found.total // MIB)

    def in_mig_mode(self) -> bool:
        modes = self.ask("nvmlDeviceGetMigMode")
        return modes is not None and modes[0] == self.constant("NVML_DEVICE_MIG_ENABLE")

    def instances(self) -> list[GPU]:
        """Return the MIG instances on this GPU."""
        found = []
        for place in range(self.ask("nvmlDeviceGetMaxMigDeviceCount") or 0):
            handle = self.ask("nvmlDeviceGetMigDeviceHandleByIndex", place)
            if handle is not None:
                found.append(GPU(self._session, place, handle, parent=self))
        return found


class Session:
    """NVML while it is open. Do not use its handles after it, or in a process forked from this."""

    def __init__(self, pynvml: Any) -> None:
        self._pynvml, self._pid, self._open = pynvml, os.getpid(), True
        self.error: type[Exception] = pynvml.NVMLError
        self.lost: tuple[type[Exception], ...] = (
            pynvml.NVMLError_GpuIsLost,
            pynvml.NVMLError_ResetRequired,
        )

    def close(self) -> None:
        self._open = False

    def constant(self, name: str) -> Any:
        return getattr(self._pynvml, name)

    def call(self, function: str, *arguments: Any, **more: Any) -> Any:
        """Call a function of NVML.

        Raises:
            NVMLError: NVML's error; also if this driver or this pynvml has no such function.
            RuntimeError: the session is closed, or was opened in the parent of this forked process.
        """
        if not self._open or os.getpid() != self._pid:
            raise RuntimeError(
                "NVML was called with a handle of a closed session, or of the process from which "
                "this one was forked"
            )
        if not hasattr(self._pynvml, function):
            raise self._pynvml.NVMLError(self._pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return getattr(self._pynvml, function)(*arguments, **more)

    def ask(self, function: str, *arguments: Any) -> Any:
        """Return the result of a function of NVML, or ``None`` if NVML fails."""
        try:
            return self.call(function, *arguments)
        except (self.error, UnicodeDecodeError):
            return None

    def gpus(self) -> list[GPU]:
        """Return every GPU that this process may see, by PCI address, as nvidia-smi does."""
        return [self._gpu(index) for index in range(self.ask("nvmlDeviceGetCount") or 0)]

    def _gpu(self, index: int) -> GPU:
        try:
            return GPU(self, index, self.call("nvmlDeviceGetHandleByIndex", index))
        except self.error as error:
            return GPU(self, index, None, error=str(error))

    def driver(self) -> str | None:
        """Return the driver's version."""
        version: str | None = self.ask("nvmlSystemGetDriverVersion")
        return version

    def driver_cuda(self) -> tuple[int, int] | None:
        """Return the newest CUDA version that the driver runs: (major, minor)."""
        version = self.ask("nvmlSystemGetCudaDriverVersion")
        return None if version is None else (version // 1000, version % 1000 // 10)


@contextmanager
def session() -> Iterator[Session]:
    """Open NVML.

    Raises:
        Unavailable: pynvml or the NVIDIA driver is not installed, or the driver does not answer.
    """
    try:
        pynvml = importlib.import_module("pynvml")
    except ImportError as error:
        missing = "NVML: the package pynvml is missing. Fix: pip install nvidia-ml-py"
        raise Unavailable(missing) from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise Unavailable(f"NVML: {_reason(pynvml, error)}") from error
    opened = Session(pynvml)
    try:
        yield opened
    finally:
        opened.close()
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _reason(pynvml: Any, error: Any) -> str:
    if isinstance(error, pynvml.NVMLError_LibraryNotFound):
        return "libnvidia-ml.so.1 not found. Fix: install the NVIDIA driver, which contains it"
    if isinstance(error, pynvml.NVMLError_LibRmVersionMismatch):
        return f"{error}: the driver was updated while it ran. Fix: restart the machine"
    return str(error)


def _mib(size: int | None) -> int | None:
    return None if size is None else size // MIB
