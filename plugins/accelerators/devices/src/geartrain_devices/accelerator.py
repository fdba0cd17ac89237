"""A base class for accelerators on ``torch.accelerator``, and the accelerators made of it."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, ClassVar

import torch

from geartrain import Plan, Run, TrainingError, UsageError, hookimpl

_MIB = 2**20


class TorchAccelerator:
    """An accelerator for a type of device that torch has, or learns from a vendor's package.

    A subclass names the type. Each process of a run has one device. The memory figures are those of
    torch's allocator, if the type's module has them.

    Source:
        https://docs.pytorch.org/docs/stable/accelerator.html
    """

    #: torch's name of the type, such as ``"xpu"``.
    device_type: ClassVar[str]
    #: The module from whose import torch learns the type; empty if torch has it.
    package: ClassVar[str] = ""
    #: The command that installs ``package``.
    install: ClassVar[str] = ""
    #: cuda has 30, mps 20, cpu 0.
    priority = 10

    # --- before a run -----------------------------------------------------------------------------

    @classmethod
    def device_module(cls) -> Any:
        """Return the module of the type, such as ``torch.xpu``.

        Raises:
            ImportError: the vendor's package is not installed, or fails.
            RuntimeError: torch does not know the type.
        """
        if cls.package:
            import_module(cls.package)
        return torch.get_device_module(cls.device_type)

    @classmethod
    def unavailable(cls) -> str | None:
        """Return why no device can be used here, or ``None``."""
        if cls.package and find_spec(cls.package) is None:
            return f"{cls.package} is not installed. Fix: {cls.install or 'install it'}"
        if cls.device_count():
            return None
        return (
            f"torch {torch.__version__} finds no device of the type {cls.device_type}. "
            "Fix: install a torch and a driver for it, or --accelerator cpu"
        )

    @classmethod
    def device_count(cls) -> int:
        """Return the number of devices that torch sees."""
        module = cls.device_module()
        return int(module.device_count()) if module.is_available() else 0

    @classmethod
    def diagnose(cls) -> dict[str, Any]:
        """Return the report for ``geartrain doctor``; never raise."""
        facts: dict[str, Any] = {"torch": torch.__version__}
        if cls.package:
            facts[cls.package] = _version_of(cls.package)
        try:
            reason = cls.unavailable()
            devices = [] if reason else cls.describe()
        except Exception as error:  # a vendor's package may fail in any way
            reason, devices = f"{type(error).__name__}: {error}. Fix: --accelerator cpu", []
        return {"facts": facts, "devices": devices, "problems": [reason] if reason else []}

    @classmethod
    def describe(cls) -> list[dict[str, Any]]:
        """Return ``index`` and, if torch knows it, ``name`` of each device."""
        ask = getattr(cls.device_module(), "get_device_name", None)
        return [
            {"index": index, **({"name": ask(index)} if ask else {})}
            for index in range(cls.device_count())
        ]

    @hookimpl
    def check_plan(self, plan: Plan) -> None:
        """Refuse a strategy with several devices in a process.

        Raises:
            UsageError: the plan has one.
        """
        if plan.layout.devices_per_process > 1:
            message = f"{plan.strategy.label} has several devices in a process, which"
            raise UsageError(
                f"{message} {plan.accelerator.label} does not support. Fix: --strategy ddp"
            )

    # --- in each process --------------------------------------------------------------------------

    @hookimpl
    def setup_device(self, run: Run, local_rank: int) -> torch.device:
        index = self.index_of(run, local_rank)
        try:
            self._device = self.start(index)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            message = f"{run.plan.accelerator.label}: {self.device_type}:{index} cannot be used"
            raise TrainingError(f"{message}: {reason}. Fix: run geartrain doctor") from error
        return self._device

    def index_of(self, run: Run, local_rank: int) -> int:
        """Return the index of a rank's device in its process."""
        return run.plan.devices[local_rank]

    def start(self, index: int) -> torch.device:
        """Make a device the current one, start it with a tensor on it, and return it."""
        device = torch.device(self.device_type, index)
        self.device_module().set_device(index)
        torch.zeros(1, device=device)
        return device

    @hookimpl
    def device_stats(self) -> dict[str, float]:
        device, module = self._device, self.device_module()
        figures = {"allocated": "memory_allocated", "reserved": "memory_reserved"}
        return {
            f"{device.type}{device.index}_memory_{name}_mib": getattr(module, ask)(device) / _MIB
            for name, ask in figures.items()
            if hasattr(module, ask)
        }

    @hookimpl
    def teardown_device(self) -> None:
        if getattr(self, "_device", None) is None:  # the device did not start
            return
        del self._device
        # An error of the last steps must not be raised in the next run.
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        empty_cache = getattr(self.device_module(), "empty_cache", None)
        if empty_cache is not None:
            empty_cache()


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


class XPUAccelerator(TorchAccelerator):
    """Train on Intel GPUs, with a build of torch for XPU."""

    device_type, priority = "xpu", 26


class NPUAccelerator(TorchAccelerator):
    """Train on Ascend NPUs, with Huawei's package ``torch-npu``."""

    device_type, priority = "npu", 25
    package, install = "torch_npu", "pip install torch-npu"
