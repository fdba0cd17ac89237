"""Which GPUs no other process occupies."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from geartrain_cuda.agree import agreed
from geartrain_cuda.nvml import GPU, Process, Unavailable, session
from geartrain_cuda.visible import view

#: Seconds for a probe: it imports torch and makes a context.
_PROBE_TIMEOUT = 120.0
_PROBE = "import torch; torch.zeros(1, device='cuda')"
_COUNT = "import torch; print(torch.cuda.device_count())"
_CUDA, _HIP = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
#: What decides on how many are visible. HIP counts after ROCR's.
_DECIDING = (_CUDA, _HIP, "ROCR_VISIBLE_DEVICES")
#: Their values -> the count.
_counted: dict[tuple[str | None, ...], int] = {}


@dataclass(frozen=True, slots=True)
class Look:
    """What is known of one visible GPU."""

    #: CUDA's, after ``CUDA_VISIBLE_DEVICES``.
    index: int
    name: str
    #: Why it cannot be taken; ``None`` where nothing speaks against it.
    taken: str | None = None
    #: Where NVML cannot say who is on it: what the variable (see ``_variable``) must be for a process that sees this GPU alone.
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
        raise ValueError(
            f"find_usable_cuda_devices({n!r}): n is a number of GPUs, or -1 for all usable ones"
        )
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
    return Look(
        index,
        name,
        (describe(others) + (" (exclusive mode)" if mode == "exclusive_process" else ""))
        if others
        else None,
    )


def describe(processes: Iterable[Process]) -> str:
    """Processes as errors name them."""
    return " and ".join(map(str, processes))


def _without_nvml() -> list[Look]:
    return [
        Look(index, f"cuda:{index}", probe_as=_entry(index))
        for index in range(count_without_nvml())
    ]


def count_without_nvml() -> int:
    """How many GPUs torch counts, where NVML cannot say. A process of its own counts, once for each value of the variables: it wakes the
    driver, and torch refuses to use CUDA in whatever a process forks after that."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.device_count()
    if not _can_have_any():
        return 0
    deciding = tuple(map(os.environ.get, _DECIDING))
    if deciding not in _counted:
        counted, error = _run(_COUNT, {})
        last = counted.split()[-1:]  # something else may print when Python or torch starts
        found = int(last[0]) if error is None and last and last[0].isdecimal() else None
        if found is None:
            reason = error or f"torch printed {counted!r}"
            warnings.warn(
                f"the GPUs could not be counted: {reason}. Fix: see why torch.cuda.device_count() fails",
                stacklevel=2,
            )
        _counted[deciding] = found or 0
    return _counted[deciding]


def _can_have_any() -> bool:
    """Whether counting is worth a process: torch is built for GPUs, and CUDA's driver, without which it finds none, is installed."""
    if torch.version.hip is not None:
        return True
    if torch.version.cuda is None:
        return False
    if sys.platform != "linux":
        return True
    try:
        ctypes.CDLL("libcuda.so.1")  # it does nothing before it is called
    except OSError:
        return False
    return True


def _variable() -> str:
    """The variable that says which GPUs are visible. HIP reads CUDA's where its own is not set, and so does torch."""
    return (
        _HIP
        if torch.version.hip is not None and (_HIP in os.environ or _CUDA not in os.environ)
        else _CUDA
    )


def _entry(index: int) -> str:
    """What the variable calls the GPU of this index, or its index where the variable is not set."""
    variable = os.environ.get(_variable())
    return str(index) if variable is None else variable.split(",")[index].strip()


def probe(name: str) -> str | None:
    """Try a small allocation on the GPU that the variable calls ``name``, in a process of its own.

    Returns:
        ``None`` if it worked, else why not. A GPU in default mode takes several processes: this finds only those that take no more.
    """
    _, error = _run(_PROBE, {_variable(): name})
    return None if error is None else f"an allocation {error}"


def _run(code: str, visible: Mapping[str, str]) -> tuple[str, str | None]:
    """Run a line of Python in a process of its own, with ``visible`` in place of the variables that say which GPUs are visible.

    Returns:
        What it printed, and ``None`` or how it ended.
    """
    environ = dict(os.environ)
    if visible:
        environ.pop(_CUDA, None)
        environ.pop(_HIP, None)
    try:
        done = subprocess.run(
            # -P: a file of the current folder that is called like a module of the standard library's, or torch, is not imported.
            [sys.executable, "-P", "-c", code],
            env={**environ, **visible},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return "", f"was not done after {_PROBE_TIMEOUT:.0f} s"
    if done.returncode == 0:
        return done.stdout.decode(errors="replace"), None
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return "", f"failed: {lines[-1] if lines else f'exit code {done.returncode}'}"


def is_ours(pid: int) -> bool:
    """Whether a process is this one or a descendant of it, such as a rank that it started."""
    while pid > 1 and pid != os.getpid():
        pid = _parent(pid)
    return pid == os.getpid()


def _parent(pid: int) -> int:
    """0 where the system does not say: the process has ended, or there is no /proc."""
    try:
        return int(
            Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1]
        )
    except (OSError, IndexError, ValueError):
        return 0
