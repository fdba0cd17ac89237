"""What NVML tells of this machine's GPUs, without making a CUDA context.

NVML is opened for each question and closed after it, never for the life of the process. nvmlInit counts its callers, so that sessions
may overlap; and a process that forks between two questions, as a training process does for its loader's workers, hands no open NVML
and no handle to its children. https://docs.nvidia.com/deploy/nvml-api/
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

MIB = 2**20


class Unavailable(Exception):
    """NVML cannot be used here; the text is the reason, as the user should read it."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process on a GPU."""

    pid: int
    #: ``None`` where NVML does not say: it is another user's, or has ended.
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
        #: The number that nvidia-smi shows; of an instance, the number on its GPU.
        self.index = index
        #: The GPU that a MIG instance is part of.
        self.parent = parent
        #: Why NVML can say nothing of it: ``"GPU is lost"``.
        self.error = error
        self.uuid: str | None = self.ask("nvmlDeviceGetUUID")
        self.name: str | None = self.ask("nvmlDeviceGetName")

    @property
    def label(self) -> str:
        """How errors name it."""
        if self.parent is not None:
            return f"MIG instance {self.index} of {self.parent.label}"
        return f"GPU {self.index} ({self.name or 'name unknown'})"

    def ask(self, function: str, *arguments: Any, **more: Any) -> Any:
        """One figure, or ``None`` where NVML cannot say: no error of one question stops the others."""
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
        """Who has a compute context here; ``None`` where NVML cannot say. Displays and other graphics alone are not among them."""
        found = self.ask("nvmlDeviceGetComputeRunningProcesses")
        if found is None:
            return None
        return [
            Process(
                p.pid, self._session.ask("nvmlSystemGetProcessName", p.pid), _mib(p.usedGpuMemory)
            )
            for p in found
        ]

    def compute_mode(self) -> str | None:
        """``"default"``, ``"exclusive_process"``, ``"prohibited"``, or ``None`` where NVML cannot say."""
        mode = (self.parent or self).ask("nvmlDeviceGetComputeMode")
        names = {"NVML_COMPUTEMODE_DEFAULT": "default", "NVML_COMPUTEMODE_PROHIBITED": "prohibited"}
        # EXCLUSIVE_THREAD, which drivers no longer set, is exclusive too.
        names |= dict.fromkeys(
            ("NVML_COMPUTEMODE_EXCLUSIVE_PROCESS", "NVML_COMPUTEMODE_EXCLUSIVE_THREAD"),
            "exclusive_process",
        )
        return next((word for name, word in names.items() if mode == self.constant(name)), None)

    def memory(self) -> tuple[int, int] | None:
        """(used, total) in MiB. What the driver keeps for itself is not in ``used``, where the driver is new enough to tell it apart."""
        found = self.ask(
            "nvmlDeviceGetMemoryInfo", version=self.constant("nvmlMemory_v2")
        ) or self.ask("nvmlDeviceGetMemoryInfo")
        return None if found is None else (found.used // MIB, found.total // MIB)

    def in_mig_mode(self) -> bool:
        modes = self.ask("nvmlDeviceGetMigMode")
        return modes is not None and modes[0] == self.constant("NVML_DEVICE_MIG_ENABLE")

    def instances(self) -> list[GPU]:
        """The MIG instances on this GPU."""
        places = range(self.ask("nvmlDeviceGetMaxMigDeviceCount") or 0)
        found = [
            (place, self.ask("nvmlDeviceGetMigDeviceHandleByIndex", place)) for place in places
        ]
        return [
            GPU(self._session, place, handle, parent=self)
            for place, handle in found
            if handle is not None
        ]


class Session:
    """NVML while it is open; what comes from one must not be used after it, nor in a process forked meanwhile."""

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
            NVMLError: as NVML answers; also where this driver or this pynvml has no such function.
            RuntimeError: the session is closed, or was opened in the process that this one was forked from.
        """
        if not self._open or os.getpid() != self._pid:
            raise RuntimeError(
                "NVML was asked through a handle of a closed session, or of the process that this one was forked from"
            )
        if not hasattr(self._pynvml, function):
            raise self._pynvml.NVMLError(self._pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return getattr(self._pynvml, function)(*arguments, **more)

    def ask(self, function: str, *arguments: Any) -> Any:
        """What a function of NVML answers, or ``None`` where it cannot say."""
        try:
            return self.call(function, *arguments)
        except (self.error, UnicodeDecodeError):
            return None

    def gpus(self) -> list[GPU]:
        """Every GPU of this machine that this process may see, in the order of PCI addresses, as nvidia-smi numbers them."""
        return [self._gpu(index) for index in range(self.ask("nvmlDeviceGetCount") or 0)]

    def _gpu(self, index: int) -> GPU:
        try:
            return GPU(self, index, self.call("nvmlDeviceGetHandleByIndex", index))
        except self.error as error:
            return GPU(self, index, None, error=str(error))

    def driver(self) -> str | None:
        """The driver's version."""
        version: str | None = self.ask("nvmlSystemGetDriverVersion")
        return version

    def driver_cuda(self) -> tuple[int, int] | None:
        """The newest CUDA that the driver runs: (major, minor)."""
        version = self.ask("nvmlSystemGetCudaDriverVersion")
        return None if version is None else (version // 1000, version % 1000 // 10)


@contextmanager
def session() -> Iterator[Session]:
    """Open NVML.

    Raises:
        Unavailable: pynvml is not installed, there is no NVIDIA driver, or it does not answer.
    """
    try:
        pynvml = importlib.import_module("pynvml")
    except ImportError as error:
        raise Unavailable(
            "NVML: the package pynvml is missing. Fix: pip install nvidia-ml-py"
        ) from error
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
        return "libnvidia-ml.so.1 not found. Fix: install the NVIDIA driver, which brings it"
    if isinstance(error, pynvml.NVMLError_LibRmVersionMismatch):
        return f"{error}: the driver was updated while it ran. Fix: restart the machine"
    return str(error)


def _mib(size: int | None) -> int | None:
    return None if size is None else size // MIB
