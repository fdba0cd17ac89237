"""The ``cuda`` accelerator."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch

from geartrain import Plan, Run, TrainingError, UsageError, hookimpl
from geartrain.plugin_api import Through
from geartrain_cuda.batches import Prefetcher
from geartrain_cuda.diagnose import diagnose, no_gpu
from geartrain_cuda.nvml import Unavailable, session
from geartrain_cuda.settings import LABEL, Settings
from geartrain_cuda.stats import Stats
from geartrain_cuda.usable import count_without_nvml, find_usable_cuda_devices, look
from geartrain_cuda.visible import view

_PRECISIONS = ("highest", "high", "medium")


class CUDAAccelerator:
    """Trains on NVIDIA GPUs (and on AMD's, with a ROCm build of torch).

    Args:
        auto_select: let ``devices=2`` take the first two GPUs that no other process occupies, and ``devices="auto"`` all of those;
            a list of indices stays as it is given.
        matmul_precision: float32 matrix products: ``"highest"`` computes in float32, ``"high"`` may use TF32, ``"medium"`` bfloat16;
            ``None`` leaves torch's setting. It is ``torch.set_float32_matmul_precision``, and says nothing of convolutions.
        cudnn_allow_tf32: let cuDNN's convolutions and RNNs use TF32; torch's own default is true, ``None`` leaves it.
        cudnn_benchmark: let cuDNN time its algorithms for each new input shape; pays where shapes stay the same.
        cudnn_deterministic: only cuDNN's deterministic algorithms; ``Trainer(deterministic=True)`` asks for more than this.
        pin_memory: copy batches to pinned memory before they go to the GPU, where the loader has not; without it the CPU waits for each
            copy.
        prefetch: batches that are copied to the GPU ahead of the step, each of which takes its memory; 0 copies when the step is due.
            Nothing is read ahead of a batch that is on the GPU already, which the loader may fill again.

    Raises:
        UsageError: an option that means nothing.
    """

    #: tpu 40, cuda 30, mps 20, cpu 0.
    priority = 30

    def __init__(
        self,
        auto_select: bool = False,
        matmul_precision: Literal["highest", "high", "medium"] | None = None,
        cudnn_allow_tf32: bool | None = None,
        cudnn_benchmark: bool | None = None,
        cudnn_deterministic: bool | None = None,
        pin_memory: bool = True,
        prefetch: int = 1,
    ) -> None:
        if matmul_precision not in (None, *_PRECISIONS):
            raise UsageError(
                f"matmul_precision={matmul_precision!r}. Fix: one of {', '.join(_PRECISIONS)}"
            )
        if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
            raise UsageError(
                f"prefetch={prefetch!r} must be a whole number of batches, at least 0."
            )
        self.auto_select, self.pin_memory, self.prefetch = auto_select, pin_memory, prefetch
        self._settings = Settings(
            matmul_precision=matmul_precision,
            cudnn_allow_tf32=cudnn_allow_tf32,
            cudnn_benchmark=cudnn_benchmark,
            cudnn_deterministic=cudnn_deterministic,
        )
        self._benchmarks = bool(cudnn_benchmark)
        self._stats = Stats()
        self._prefetcher: Prefetcher | None = None
        self._device: torch.device | None = None
        #: The current device before the run; ``None`` where CUDA was not in use.
        self._device_before: int | None = None

    # --- before any run: none of these makes a context -------------------------------------------------------------------

    @staticmethod
    def unavailable() -> str | None:
        """Why cuda cannot serve here, or ``None`` when it can."""
        return no_gpu()

    @staticmethod
    def device_count() -> int:
        """GPUs that CUDA shows this process, as NVML and ``CUDA_VISIBLE_DEVICES`` tell; without NVML, torch in another process."""
        if torch.version.hip is None:
            try:
                with session() as nvml:
                    return len(view(nvml).devices)
            except Unavailable:
                pass
        return count_without_nvml()

    @staticmethod
    def diagnose() -> dict[str, Any]:
        """What ``geartrain doctor`` shows; never raises and makes no context. See :func:`geartrain_cuda.diagnose.diagnose`."""
        return diagnose()

    def select_devices(self, devices: Any, indices: Sequence[int]) -> list[int]:
        """The GPUs to take for ``devices=``, which the grammar has read as ``indices``.

        Raises:
            UsageError: ``auto_select`` finds too few free ones.
        """
        counted = isinstance(devices, int) or (isinstance(devices, str) and "," not in devices)
        if not self.auto_select or not counted:
            return list(indices)
        every = devices == -1 or (isinstance(devices, str) and devices.strip() in ("auto", "-1"))
        try:
            found = find_usable_cuda_devices(-1 if every else len(indices))
            return found or find_usable_cuda_devices(1)  # none is free: this one says why
        except (ValueError, RuntimeError) as error:
            raise UsageError(f"{LABEL}: auto_select: {error}") from error

    @hookimpl
    def check_plan(self, plan: Plan) -> None:
        """Refuse more processes than there are GPUs for, and settings that contradict each other or what the program has set."""
        layout = plan.layout
        needed = (layout.processes_per_node or 1) * layout.devices_per_process
        if needed > len(plan.devices):
            raise UsageError(
                f"{plan.strategy.label} plans {layout.processes_per_node or 1} processes of {layout.devices_per_process} GPUs each on "
                f"every node, and devices={list(plan.devices)} are {len(plan.devices)}. Fix: --devices {needed}"
            )
        if plan.options.deterministic and self._benchmarks:
            raise UsageError(
                f"{plan.accelerator.label}: cudnn_benchmark=True chooses algorithms by their time, and "
                f"deterministic={plan.options.deterministic!r} asks for the same ones in every run. Fix: leave one of them out"
            )
        self._settings.check()

    # --- in each process -------------------------------------------------------------------------------------------------

    @hookimpl
    def setup_device(self, run: Run, local_rank: int) -> torch.device:
        each = run.plan.layout.devices_per_process
        indices = run.plan.devices[local_rank * each : (local_rank + 1) * each]
        if len(indices) < each:
            raise TrainingError(
                f"{run.plan.accelerator.label}: local rank {local_rank} has no GPU: the plan's devices are {list(run.plan.devices)}, "
                f"{each} for each process. Fix: start no more than {len(run.plan.devices) // each} processes on this node"
            )
        self._settings.apply()
        self._stats = Stats()  # its counters are this run's
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._device_before = torch.cuda.current_device()
        for index in reversed(indices):  # the first stays the current one
            _occupy(run.plan.accelerator.label, index)
        self._device = torch.device("cuda", indices[0])
        if local_rank == 0:
            _warn_of_emulation(run.plan)
        self._prefetcher = Prefetcher(self._device, self.prefetch, self.pin_memory)
        return self._device

    @hookimpl
    def device_batches(self, run: Run, loader: Iterable[Any], stage: str) -> Iterator[Any]:
        return (
            Through(iter(loader), loader, run.to_device)
            if self._prefetcher is None
            else self._prefetcher.batches(run, loader, stage)
        )

    @hookimpl
    def device_stats(self, run: Run) -> dict[str, float] | None:
        return self._stats.sample(run)

    @hookimpl
    def teardown_device(self) -> None:
        device, self._device, self._prefetcher = self._device, None, None
        before, self._device_before = self._device_before, None
        try:
            if device is not None:
                # The CPU waits for the GPU here: an error of the last steps is this run's, and must not surface in the next one's.
                torch.cuda.synchronize(device)
                torch.cuda.empty_cache()
        finally:
            self._settings.put_back()
            if before is not None:
                torch.cuda.set_device(before)


def _warn_of_emulation(plan: Plan) -> None:
    """Say once for a node which of its GPUs have no bfloat16 in hardware: torch computes it on them all the same, in other ways."""
    if not plan.precision.name.startswith("bf16") or torch.version.hip is not None:
        return
    found = {}
    for index in plan.devices:
        gpu = torch.cuda.get_device_properties(index)
        if (
            gpu.major < 8
        ):  # as torch.cuda.is_bf16_supported(including_emulation=False), which asks the current one
            found[index] = gpu.name
    if found:
        names = ", ".join(f"cuda:{index} ({name})" for index, name in found.items())
        warnings.warn(
            f"{plan.accelerator.label}: precision {plan.precision.name} is emulated, without a gain in speed, on {names}: bfloat16 needs "
            "compute capability 8.0. Fix: --precision 16-mixed",
            stacklevel=2,
        )


def _occupy(label: str, index: int) -> None:
    """Make a context on a GPU, and it the current one.

    Raises:
        TrainingError: it is not there, or takes no context: it is in use in exclusive mode, full, or lost.
    """
    try:
        torch.cuda.set_device(index)
        torch.zeros(1, device=torch.device("cuda", index))
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        seen = next((item for item in look() if item.index == index), None)
        if seen is None:
            what, fix = (
                f"there is no GPU {index}; {CUDAAccelerator.device_count()} are visible",
                "give devices= that are",
            )
        else:
            what = f"{seen.name} cannot be used" + (
                f", taken by {seen.taken}" if seen.taken else ""
            )
            fix = (
                "end those processes, take other devices=, or --accelerator.auto_select true"
                if seen.taken
                else "geartrain doctor"
            )
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TrainingError(f"{label}: {what}: {reason}. Fix: {fix}") from error
