"""The ``cuda`` accelerator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch

from geartrain import Plan, Run, TrainingError, UsageError, hookimpl
from geartrain.plugin_api import MappedBatches, warn
from geartrain_cuda.batches import Prefetcher
from geartrain_cuda.diagnose import diagnose, no_gpu
from geartrain_cuda.nvml import Unavailable, session
from geartrain_cuda.settings import LABEL, Settings
from geartrain_cuda.stats import Stats
from geartrain_cuda.usable import count_without_nvml, find_usable_cuda_devices, look
from geartrain_cuda.visible import view

_PRECISIONS = ("highest", "high", "medium")


class CUDAAccelerator:
    """Train on NVIDIA GPUs, or on AMD GPUs with a ROCm build of torch.

    Args:
        auto_select: if True, ``devices=2`` takes the first two GPUs that no other process occupies,
            and ``devices="auto"`` takes all such GPUs. A list of indices is used as it is.
        matmul_precision: precision of float32 matrix products: ``"highest"`` computes in float32,
            ``"high"`` may use TF32, ``"medium"`` bfloat16, ``None`` keeps torch's setting. It is
            ``torch.set_float32_matmul_precision``, which does not affect convolutions.
        cudnn_allow_tf32: if True, cuDNN's convolutions and RNNs may use TF32. torch's default is
            True; ``None`` keeps torch's setting.
        cudnn_benchmark: if True, cuDNN times its algorithms for each new input shape. This helps if
            the shapes rarely change. ``None`` keeps torch's setting.
        cudnn_deterministic: if True, cuDNN uses only deterministic algorithms. ``None`` keeps
            torch's setting. ``Trainer(deterministic=True)`` covers more than cuDNN.
        pin_memory: if True, copy batches to pinned memory before the copy to the GPU, unless the
            loader has pinned them. If False, the CPU waits for each copy.
        prefetch: number of batches that are copied to the GPU before their step. Each takes memory
            of the GPU. 0 copies a batch when its step starts. If a loader returns batches that are
            on the GPU already, no batch is read ahead, because the loader may reuse their memory.

    Raises:
        UsageError: an option has an invalid value.

    Source:
        https://docs.pytorch.org/docs/stable/notes/cuda.html
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
                f"matmul_precision={matmul_precision!r} is unknown. "
                f"Fix: use one of {', '.join(_PRECISIONS)}"
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
        #: The current device before the run; ``None`` if CUDA was not in use.
        self._device_before: int | None = None

    # --- before a run: none of these creates a context --------------------------------------------

    @staticmethod
    def unavailable() -> str | None:
        """Return the reason why cuda cannot be used here, or ``None``."""
        return no_gpu()

    @staticmethod
    def device_count() -> int:
        """Return the number of GPUs that CUDA shows this process.

        NVML and ``CUDA_VISIBLE_DEVICES`` decide. Without NVML, torch counts in another process.
        """
        if torch.version.hip is None:
            try:
                with session() as nvml:
                    return len(view(nvml).devices)
            except Unavailable:
                pass
        return count_without_nvml()

    @staticmethod
    def diagnose() -> dict[str, Any]:
        """Return the report for ``geartrain doctor``: see :func:`geartrain_cuda.diagnose.diagnose`.

        It never raises and creates no CUDA context.
        """
        return diagnose()

    def select_devices(self, devices: Any, indices: Sequence[int]) -> list[int]:
        """Return the indices of the GPUs for a run.

        Args:
            devices: the value of ``devices=``.
            indices: the indices that core has read from it.

        Raises:
            UsageError: ``auto_select`` finds too few free GPUs.
        """
        counted = isinstance(devices, int) or (isinstance(devices, str) and "," not in devices)
        if not self.auto_select or not counted:
            return list(indices)
        every = devices == -1 or (isinstance(devices, str) and devices.strip() in ("auto", "-1"))
        try:
            found = find_usable_cuda_devices(-1 if every else len(indices))
            return found or find_usable_cuda_devices(1)  # if no GPU is free, this raises the reason
        except (ValueError, RuntimeError) as error:
            raise UsageError(f"{LABEL}: auto_select: {error}") from error

    @hookimpl
    def check_plan(self, plan: Plan) -> None:
        """Refuse too many processes for the GPUs, and contradictory settings.

        Raises:
            UsageError: there are too few GPUs, two options contradict each other, or a setting
                contradicts one that the program has set.
        """
        layout = plan.layout
        needed = (layout.processes_per_node or 1) * layout.devices_per_process
        if needed > len(plan.devices):
            raise UsageError(
                f"{plan.strategy.label} plans {layout.processes_per_node or 1} processes of "
                f"{layout.devices_per_process} GPUs each on every node, but "
                f"devices={list(plan.devices)} are {len(plan.devices)}. Fix: --devices {needed}"
            )
        if plan.options.deterministic and self._benchmarks:
            raise UsageError(
                f"{plan.accelerator.label}: cudnn_benchmark=True chooses algorithms by their time, "
                f"but deterministic={plan.options.deterministic!r} requires the same algorithms in "
                "every run. Fix: leave one of them out"
            )
        self._settings.check()

    # --- in each process --------------------------------------------------------------------------

    @hookimpl
    def setup_device(self, run: Run, local_rank: int) -> torch.device:
        each = run.plan.layout.devices_per_process
        indices = run.plan.devices[local_rank * each : (local_rank + 1) * each]
        if len(indices) < each:
            raise TrainingError(
                f"{run.plan.accelerator.label}: local rank {local_rank} has no GPU: the plan's "
                f"devices are {list(run.plan.devices)}, {each} for each process. "
                f"Fix: start at most {len(run.plan.devices) // each} processes on this node"
            )
        self._settings.apply()
        self._stats = Stats()  # with the counters of this run
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._device_before = torch.cuda.current_device()
        for index in reversed(indices):  # the first index becomes the current device
            _occupy(run.plan.accelerator.label, index)
        self._device = torch.device("cuda", indices[0])
        if local_rank == 0:
            _warn_of_emulation(run.plan)
        self._prefetcher = Prefetcher(self._device, self.prefetch, self.pin_memory)
        return self._device

    @hookimpl
    def device_batches(self, run: Run, loader: Iterable[Any], stage: str) -> Iterator[Any]:
        if self._prefetcher is None:
            return MappedBatches(iter(loader), loader, run.to_device)
        return self._prefetcher.batches(run, loader, stage)

    @hookimpl
    def device_stats(self, run: Run) -> dict[str, float] | None:
        return self._stats.sample(run)

    @hookimpl
    def teardown_device(self) -> None:
        device, self._device, self._prefetcher = self._device, None, None
        before, self._device_before = self._device_before, None
        try:
            if device is not None:
                # Wait for the GPU: an error of the last steps must not be raised in the next run.
                torch.cuda.synchronize(device)
                torch.cuda.empty_cache()
        finally:
            self._settings.put_back()
            if before is not None:
                torch.cuda.set_device(before)


def _warn_of_emulation(plan: Plan) -> None:
    """Warn of this node's GPUs without bfloat16 in hardware, on which torch emulates it."""
    if not plan.precision.name.startswith("bf16") or torch.version.hip is not None:
        return
    found = {}
    for index in plan.devices:
        gpu = torch.cuda.get_device_properties(index)
        # As torch.cuda.is_bf16_supported(including_emulation=False), which checks the current
        # device.
        if gpu.major < 8:
            found[index] = gpu.name
    if found:
        names = ", ".join(f"cuda:{index} ({name})" for index, name in found.items())
        warn(
            f"{plan.accelerator.label}: precision {plan.precision.name} is emulated, without a "
            f"gain in speed, on {names}: bfloat16 needs compute capability 8.0. "
            "Fix: --precision 16-mixed"
        )


def _occupy(label: str, index: int) -> None:
    """Create a context on a GPU, and make it the current device.

    Raises:
        TrainingError: the GPU does not exist, or accepts no context, because another process uses
            it in exclusive mode, its memory is full, or it is lost.
    """
    try:
        torch.cuda.set_device(index)
        torch.zeros(1, device=torch.device("cuda", index))
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        seen = next((item for item in look() if item.index == index), None)
        if seen is None:
            problem = f"there is no GPU {index}; {CUDAAccelerator.device_count()} are visible"
            hint = "choose visible devices="
        elif seen.taken:
            problem = f"{seen.name} cannot be used, taken by {seen.taken}"
            hint = "end those processes, use other devices=, or --accelerator.auto_select true"
        else:
            problem, hint = f"{seen.name} cannot be used", "run geartrain doctor"
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TrainingError(f"{label}: {problem}: {reason}. Fix: {hint}") from error
