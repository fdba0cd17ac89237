"""Which GPUs no other process occupies."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from geartrain_cuda.agree import agreed
from geartrain_cuda.nvml import GPU, Process, Unavailable, session
from geartrain_cuda.visible import view

#: Seconds for a probe: it imports torch and makes a context.
_PROBE_TIMEOUT = 120.0
_PROBE = "import torch; torch.zeros(1, device='cuda')"


@dataclass(frozen=True, slots=True)
class Look:
    """What is known of one visible GPU."""

    #: CUDA's, after ``CUDA_VISIBLE_DEVICES``.
    index: int
    name: str
    #: Why it cannot be taken; ``None`` where nothing speaks against it.
    taken: str | None = None
    #: Where NVML cannot say who is on it: what ``CUDA_VISIBLE_DEVICES`` must be for a process that sees this GPU alone.
    probe_as: str | None = None


def find_usable_cuda_devices(n: int = -1) -> list[int]:
    """The first ``n`` GPUs that no other process occupies.

    NVML is asked for compute modes and compute processes; only where it cannot say, a process of its own tries a small allocation, so that
    no CUDA context is left behind here. A GPU is occupied by another process's compute context; not by a display alone, and not by this
    process and those it started. Ranks that geartrain starts give the answers of the process that started them.

    Args:
        n: how many; -1 for all usable ones.

    Returns:
        Indices as ``devices=`` takes them, ascending.

    Raises:
        ValueError: ``n`` is no whole number from -1, or more than there are.
        RuntimeError: fewer are free; it names the others and their processes. Or ranks would choose apart, see ``docs/cuda.md``.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < -1:
        raise ValueError(f"find_usable_cuda_devices({n!r}): n is a number of GPUs, or -1 for all usable ones")
    return agreed(n, lambda: _find(n)) if n else []


def _find(n: int) -> list[int]:
    looks = look()
    if n > len(looks):
        raise ValueError(f"find_usable_cuda_devices({n}): only {len(looks)} GPUs are visible")
    free: list[int] = []
    taken: list[str] = []
    for seen in looks:
        if len(free) == n:
            break
        why = seen.taken or (probe(seen.probe_as) if seen.probe_as is not None else None)
        if why is None:
            free.append(seen.index)
        else:
            taken.append(f"{seen.name}: {why}")
    if len(free) < n:
        raise RuntimeError(
            f"find_usable_cuda_devices({n}): only {len(free)} of {len(looks)} GPUs are free ({free}). {'; '.join(taken)}. "
            "Fix: end those processes, or ask for fewer"
        )
    return free


def look() -> list[Look]:
    """Every visible GPU, in the order of its index."""
    if torch.version.hip is not None:
        return _without_nvml()  # NVML knows NVIDIA's alone
    try:
        with session() as nvml:
            seen = view(nvml)
            seen.warn()
            return [_look(index, gpu) for index, gpu in enumerate(seen.devices)]
    except Unavailable:
        return _without_nvml()


def _look(index: int, gpu: GPU) -> Look:
    name = f"cuda:{index}, {gpu.label}"
    mode, processes = gpu.compute_mode(), gpu.processes()
    if gpu.error is not None:  # lost, as one of the answers said
        return Look(index, name, gpu.error)
    if mode == "prohibited":
        return Look(index, name, "its compute mode is PROHIBITED; nvidia-smi -c DEFAULT changes it")
    if processes is None:
        return Look(index, name, probe_as=gpu.uuid or _entry(index))
    others = [process for process in processes if not is_ours(process.pid)]
    return Look(index, name, (describe(others) + (" (exclusive mode)" if mode == "exclusive_process" else "")) if others else None)


def describe(processes: Iterable[Process]) -> str:
    """Processes as errors name them."""
    return " and ".join(map(str, processes))


def _without_nvml() -> list[Look]:
    return [Look(index, f"cuda:{index}", probe_as=_entry(index)) for index in range(count_without_nvml())]


def count_without_nvml() -> int:
    """How many GPUs CUDA shows, where NVML cannot say. It makes no context, but it does wake the driver: torch then refuses to use CUDA in
    a process that is forked from this one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no driver; the count says so too
        return torch.cuda.device_count()


def _entry(index: int) -> str:
    """What ``CUDA_VISIBLE_DEVICES`` calls the GPU of this index, or its index where the variable is not set."""
    variable = os.environ.get("HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES")
    return str(index) if variable is None else variable.split(",")[index].strip()


def probe(name: str) -> str | None:
    """Try a small allocation on the GPU that ``CUDA_VISIBLE_DEVICES`` calls ``name``, in a process of its own.

    Returns:
        ``None`` if it worked, else why not. A GPU in default mode takes several processes: this finds only those that take no more.
    """
    variable = "HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            env={**os.environ, variable: name},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_PROBE_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return f"an allocation was not done after {_PROBE_TIMEOUT:.0f} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return f"an allocation failed: {lines[-1] if lines else f'exit code {done.returncode}'}"


def is_ours(pid: int) -> bool:
    """Whether a process is this one or a descendant of it, such as a rank that it started."""
    while pid > 1 and pid != os.getpid():
        pid = _parent(pid)
    return pid == os.getpid()


def _parent(pid: int) -> int:
    """0 where the system does not say: the process has ended, or there is no /proc."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0
