"""The check ``machine``: disk, shared memory, limits, processors and memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from geartrain_tools.doctor.findings import Section

MIB = 2**20
#: Free bytes on a disk: with less, a checkpoint or a log may not fit.
_DISK = 1024 * MIB
#: Docker's default for a container, in bytes. Loader workers pass batches through it.
_SHARED = 64 * MIB
#: Available bytes of memory: with less, torch may not even start in several processes.
_MEMORY = 1024 * MIB
#: Open files: loader workers need one per tensor of each batch that waits in the queue.
_FILES = 1024
_CGROUP = Path("/sys/fs/cgroup")
_PROC = Path("/proc")


def machine(section: Section) -> None:
    """Check disk, /dev/shm, limits, processors and memory; sizes are in MiB."""
    _disks(section)
    _shared_memory(section)
    _limits(section)
    _processors(section)
    _memory(section)


def _disks(section: Section) -> None:
    disks = section.facts["disk"] = {}
    for message, path in (
        ("current folder", os.getcwd()),
        ("temporary folder", _temporary(section)),
    ):
        if path is None:
            continue
        usage = shutil.disk_usage(path)
        disks[message] = {
            "path": path,
            "free_mib": usage.free // MIB,
            "total_mib": usage.total // MIB,
        }
        if usage.free < _DISK:
            hint = (
                "free some, or --output DIR on another disk"
                if message == "current folder"
                else "free some, or set TMPDIR"
            )
            section.problem(f"the {message} ({path}) has {usage.free // MIB} MiB free", hint)
        if not os.access(path, os.W_OK):
            section.warn(f"the {message} ({path}) cannot be written to", "--output DIR elsewhere")


def _temporary(section: Section) -> str | None:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError as error:
        section.problem(
            f"there is no temporary folder: {error.strerror}",
            "set TMPDIR to a folder that can be written to",
        )
        return None


def _shared_memory(section: Section) -> None:
    section.facts["shared_memory"] = None
    if not os.path.isdir("/dev/shm"):
        return  # macOS and Windows have another kind of shared memory, without its own limit
    stats = os.statvfs("/dev/shm")
    size, free = stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    section.facts["shared_memory"] = {
        "path": "/dev/shm",
        "free_mib": free // MIB,
        "total_mib": size // MIB,
    }
    if size <= _SHARED:
        section.problem(
            f"/dev/shm has {size // MIB} MiB: loader workers hand batches over in it and die with "
            "a bus error once it is full",
            "docker run --shm-size=8g (or --ipc=host); elsewhere "
            "mount -o remount,size=8g /dev/shm, or num_workers=0",
        )
    elif free < _SHARED:
        section.problem(
            f"/dev/shm has {free // MIB} MiB free of {size // MIB}",
            "remove files that dead programs left there",
        )


def _limits(section: Section) -> None:
    section.facts["open_files"] = None
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    section.facts["open_files"] = {"soft": soft, "hard": hard}
    if soft is not None and soft < _FILES:
        section.warn(
            f"this process may have {soft} files open, and loader workers may need more",
            f"ulimit -n {min(hard or 65536, 65536)}",
        )


def _processors(section: Section) -> None:
    usable = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = _cpu_quota()
    threads = os.environ.get("OMP_NUM_THREADS")
    section.facts["processors"] = {
        "machine": os.cpu_count(),
        "usable": usable,
        "cgroup": quota,
        "omp_num_threads": threads,
    }
    fit = usable if quota is None else min(usable, max(1, int(quota)))
    # One number per level of nested parallel regions, the outermost first.
    levels = [] if threads is None else [level.strip() for level in threads.split(",")]
    if not all(level.isdecimal() and int(level) > 0 for level in levels):
        section.problem(
            f"OMP_NUM_THREADS={threads!r} is not a number above 0",
            f"export OMP_NUM_THREADS={fit}, or unset it",
        )
    elif levels and int(levels[0]) > fit:
        section.warn(
            f"OMP_NUM_THREADS={threads}, but this process may use only {fit} processor(s)",
            f"export OMP_NUM_THREADS={fit}, or unset it",
        )
    elif threads is None and fit < usable:
        section.warn(
            f"the container may use {quota:g} processor(s) and sees {usable}: "
            f"torch would start {usable} threads",
            f"export OMP_NUM_THREADS={fit}",
        )


def _memory(section: Section) -> None:
    facts: dict[str, int | None] = {
        "total_mib": None,
        "available_mib": None,
        "cgroup_mib": None,
        "cgroup_free_mib": None,
    }
    section.facts["memory"] = facts
    try:
        lines = (_PROC / "meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return
    kib = {
        name: int(others.split()[0]) for name, _, others in (line.partition(":") for line in lines)
    }
    total, remaining = kib["MemTotal"] // 1024, kib.get("MemAvailable", kib["MemFree"]) // 1024
    facts["total_mib"], facts["available_mib"] = total, remaining
    # In version 1, a huge number means no limit.
    limits = [(limit, free) for limit, free in _memory_limits() if limit // MIB < total]
    if limits:
        limit, free = (min(numbers) // MIB for numbers in zip(*limits, strict=True))
        facts["cgroup_mib"], facts["cgroup_free_mib"] = limit, free
        remaining = min(remaining, free)
    if remaining * MIB < _MEMORY:
        section.warn(
            f"{remaining} MiB of memory are available",
            "stop other programs, or give the container more",
        )


# --- cgroups: https://docs.kernel.org/admin-guide/cgroup-v2.html and .../cgroup-v1/memory.html ----


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups: version 2, then version 1.

    The order is from the process's group to the root. Each group limits the groups inside it: a
    SLURM job limits its tasks. A container sees its group as the root, so some of these folders may
    not exist.
    """
    try:
        lines = [line.split(":", 2) for line in (_PROC / "self/cgroup").read_text().splitlines()]
    except OSError:
        return
    limits = {
        key: path.strip("/") for _, controllers, path in lines for key in controllers.split(",")
    }
    for root, group in (
        (_CGROUP, limits.get("", "")),
        (_CGROUP / controller, limits.get(controller, "")),
    ):
        place = root / group
        yield from (
            folder for folder in (place, *place.parents) if folder == root or root in folder.parents
        )


def _file(group: Path, *names: str) -> str:
    """Return the content of the first of these files that exists; empty if none does."""
    for name in names:
        with contextlib.suppress(OSError):
            return (group / name).read_text().strip()
    return ""


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Yield the limit and its free part, in bytes, of each control group that limits memory."""
    for group in _groups("memory"):
        limit = _file(group, "memory.max", "memory.limit_in_bytes")
        if not limit.isdecimal():  # "max"
            continue
        used = int(_file(group, "memory.current", "memory.usage_in_bytes") or 0)
        counts = dict(line.split(maxsplit=1) for line in _file(group, "memory.stat").splitlines())
        # The page cache counts as used, but the kernel frees it when memory is needed. In version
        # 1, only the counter with total_ includes the groups inside.
        cache = int(counts.get("total_inactive_file") or counts.get("inactive_file") or 0)
        yield int(limit), max(0, int(limit) - max(0, used - cache))


def _cpu_quota() -> float | None:
    """Return the number of processors that the control groups allow; ``None`` without a limit."""
    quotas = []
    for group in _groups("cpu"):
        text = (
            _file(group, "cpu.max")
            or f"{_file(group, 'cpu.cfs_quota_us')} {_file(group, 'cpu.cfs_period_us')}"
        )
        quota, _, period = text.partition(" ")
        if quota.isdecimal():  # no limit is "max", and -1 in version 1
            quotas.append(int(quota) / int(period or 100_000))
    return min(quotas, default=None)
