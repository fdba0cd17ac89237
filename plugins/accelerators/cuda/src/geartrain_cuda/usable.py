"""Find the GPUs that no other process occupies."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from geartrain.plugin_api import warn
from geartrain_cuda.agree import agreed
from geartrain_cuda.nvml import GPU, Process, Unavailable, session
from geartrain_cuda.visible import view

#: Seconds for a probe, which imports torch and creates a context.
_PROBE_TIMEOUT = 120.0
_PROBE = "import torch; torch.zeros(1, device='cuda')"
_COUNT = "import torch; print(torch.cuda.device_count())"
_CUDA, _HIP = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
#: The variables that change the number of visible GPUs. HIP numbers the GPUs that ROCR shows.
_DECIDING = (_CUDA, _HIP, "ROCR_VISIBLE_DEVICES")
#: Values of these variables -> the number of GPUs.
_counted: dict[tuple[str | None, ...], int] = {}


@dataclass(frozen=True, slots=True)
class Look:
    """The state of one visible GPU."""

    #: CUDA's index, after ``CUDA_VISIBLE_DEVICES``.
    index: int
    name: str
    #: The reason why it cannot be used, or ``None``.
    taken: str | None = None
    #: If NVML does not know its processes: the value of the variable (see ``_variable``) with which
    #: a process sees only this GPU.
    probe_as: str | None = None


def find_usable_cuda_devices(n: int = -1) -> list[int]:
    """Return the first ``n`` GPUs that no other process occupies.

    NVML returns compute modes and compute processes. If NVML does not know them, another process
    tries a small allocation, so that this process has no CUDA context. A GPU is occupied if another
    process has a compute context on it. A display alone does not occupy it, nor do this process and
    the processes that it started. Ranks that geartrain starts return the answers of the process
    that started them.

    Args:
        n: number of GPUs; -1 for all usable ones.

    Returns:
        Ascending indices, for ``devices=``.

    Raises:
        ValueError: ``n`` is no whole number of at least -1, or exceeds the number of visible GPUs.
        RuntimeError: fewer GPUs are free; the error names the others and their processes. Or ranks
            would choose independently, see ``docs/cuda.md``.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < -1:
        raise ValueError(
            f"find_usable_cuda_devices({n!r}): n must be a number of GPUs, or -1 for all usable "
            "ones. Fix: pass such a number"
        )
    return agreed(n, lambda: _find(n)) if n else []


def _find(n: int) -> list[int]:
    looks = look()
    if n > len(looks):
        raise ValueError(
            f"find_usable_cuda_devices({n}): only {len(looks)} GPUs are visible. Fix: ask for fewer"
        )
    free: list[int] = []
    taken: list[str] = []
    for seen in looks:
        if len(free) == n:
            break
        reason = seen.taken or (probe(seen.probe_as) if seen.probe_as is not None else None)
        if reason is None:
            free.append(seen.index)
        else:
            taken.append(f"{seen.name}: {reason}")
    if len(free) < n:
        raise RuntimeError(
            f"find_usable_cuda_devices({n}): only {len(free)} of {len(looks)} GPUs are free "
            f"({free}). {'; '.join(taken)}. Fix: end those processes, or ask for fewer"
        )
    return free


def look() -> list[Look]:
    """Return the state of every visible GPU, in the order of their indices."""
    if torch.version.hip is not None:
        return _without_nvml()  # NVML knows only NVIDIA's GPUs
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
    if gpu.error is not None:  # the calls above have found that the GPU is lost
        return Look(index, name, gpu.error)
    if mode == "prohibited":
        return Look(index, name, "its compute mode is PROHIBITED; nvidia-smi -c DEFAULT changes it")
    if processes is None:
        return Look(index, name, probe_as=gpu.uuid or _entry(index))
    others = [process for process in processes if not is_ours(process.pid)]
    if not others:
        return Look(index, name)
    exclusive = " (exclusive mode)" if mode == "exclusive_process" else ""
    return Look(index, name, describe(others) + exclusive)


def describe(processes: Iterable[Process]) -> str:
    """Return the names of processes in errors."""
    return " and ".join(map(str, processes))


def _without_nvml() -> list[Look]:
    count = count_without_nvml()
    return [Look(index, f"cuda:{index}", probe_as=_entry(index)) for index in range(count)]


def count_without_nvml() -> int:
    """Return the number of GPUs that torch counts, if NVML cannot be used.

    Another process counts, once for each value of the variables: counting initializes the driver,
    and torch refuses to use CUDA in processes that are forked after that.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.device_count()
    if not _can_have_any():
        return 0
    deciding = tuple(map(os.environ.get, _DECIDING))
    if deciding not in _counted:
        counted, error = run_alone(_COUNT, {})
        last = counted.split()[-1:]  # other code may print when Python or torch starts
        found = int(last[0]) if error is None and last and last[0].isdecimal() else None
        if found is None:
            reason = error or f"torch printed {counted!r}"
            warn(
                f"the GPUs could not be counted: {reason}. "
                "Fix: find out why torch.cuda.device_count() fails"
            )
        _counted[deciding] = found or 0
    return _counted[deciding]


def _can_have_any() -> bool:
    """True if torch is built for GPUs and CUDA's driver is installed, so counting makes sense."""
    if torch.version.hip is not None:
        return True
    if torch.version.cuda is None:
        return False
    if sys.platform != "linux":
        return True
    try:
        ctypes.CDLL("libcuda.so.1")  # loading it does not initialize the driver
    except OSError:
        return False
    return True


def _variable() -> str:
    """Return the variable that selects GPUs. HIP and torch read CUDA's if HIP's is unset."""
    if torch.version.hip is not None and (_HIP in os.environ or _CUDA not in os.environ):
        return _HIP
    return _CUDA


def _entry(index: int) -> str:
    """Return the variable's entry for the GPU of this index, or the index if it is not set."""
    variable = os.environ.get(_variable())
    return str(index) if variable is None else variable.split(",")[index].strip()


def probe(name: str) -> str | None:
    """Try a small allocation on one GPU, in another process.

    A GPU in default mode accepts several processes, so the allocation may work on an occupied GPU.

    Args:
        name: the GPU's entry in the variable.

    Returns:
        ``None`` if it worked, else the reason.
    """
    _, error = run_alone(_PROBE, {_variable(): name})
    return None if error is None else f"an allocation {error}"


def run_alone(code: str, visible: Mapping[str, str]) -> tuple[str, str | None]:
    """Run a line of Python in another process.

    Args:
        code: the line.
        visible: replaces the variables that select visible GPUs.

    Returns:
        The output, and ``None`` or a failure.
    """
    environ = dict(os.environ)
    if visible:
        environ.pop(_CUDA, None)
        environ.pop(_HIP, None)
    try:
        done = subprocess.run(
            # -P: do not import files of the current folder, which may have the name of a module of
            # the standard library or torch.
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
    """True if a process is this one or a descendant of it, such as a rank that it started."""
    while pid > 1 and pid != os.getpid():
        pid = _parent(pid)
    return pid == os.getpid()


def _parent(pid: int) -> int:
    """Return the parent of a process; 0 if the process has ended, or /proc does not exist."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return int(stat.rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0
