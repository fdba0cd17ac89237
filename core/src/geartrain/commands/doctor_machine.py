"""``geartrain doctor``: this machine's disk, shared memory, limits, processors and memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from geartrain.commands.doctor_findings import Section

MIB = 2**20
#: Bytes free below which a checkpoint or a log may not fit.
_DISK = 1024 * MIB
#: What Docker gives a container; loader workers hand batches over in it.
_SHARED = 64 * MIB
#: Bytes of memory available below which torch itself hardly starts in several processes.
_MEMORY = 1024 * MIB
#: Descriptors below which loader workers run out: each batch in flight holds one a tensor.
_FILES = 1024
_CGROUP = Path("/sys/fs/cgroup")
_PROC = Path("/proc")


def machine(section: Section) -> None:
    """Disk, /dev/shm, limits, processors, memory; sizes are in MiB."""
    _disks(section)
    _shared_memory(section)
    _limits(section)
    _processors(section)
    _memory(section)


def _disks(section: Section) -> None:
    disks = section.facts["disk"] = {}
    for what, path in (("current folder", os.getcwd()), ("temporary folder", _temporary(section))):
        if path is None:
            continue
        usage = shutil.disk_usage(path)
        disks[what] = {"path": path, "free_mib": usage.free // MIB, "total_mib": usage.total // MIB}
        if usage.free < _DISK:
            fix = "free some, or --output DIR on another disk" if what == "current folder" else "free some, or set TMPDIR"
            section.problem(f"the {what} ({path}) has {usage.free // MIB} MiB free", fix)
        if not os.access(path, os.W_OK):
            section.warn(f"the {what} ({path}) cannot be written to", "--output DIR elsewhere")


def _temporary(section: Section) -> str | None:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError as error:
        section.problem(f"there is no temporary folder: {error.strerror}", "set TMPDIR to a folder that can be written to")
        return None


def _shared_memory(section: Section) -> None:
    section.facts["shared_memory"] = None
    if not os.path.isdir("/dev/shm"):
        return  # macOS and Windows have another kind, without a limit of its own
    stats = os.statvfs("/dev/shm")
    size, free = stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    section.facts["shared_memory"] = {"path": "/dev/shm", "free_mib": free // MIB, "total_mib": size // MIB}
    if size <= _SHARED:
        section.problem(
            f"/dev/shm has {size // MIB} MiB: loader workers hand batches over in it and die with a bus error once it is full",
            "docker run --shm-size=8g (or --ipc=host); elsewhere mount -o remount,size=8g /dev/shm, or num_workers=0",
        )
    elif free < _SHARED:
        section.problem(f"/dev/shm has {free // MIB} MiB free of {size // MIB}", "remove what dead programs have left there")


def _limits(section: Section) -> None:
    section.facts["open_files"] = None
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    section.facts["open_files"] = {"soft": soft, "hard": hard}
    if soft is not None and soft < _FILES:
        section.warn(f"this process may have {soft} files open, and loader workers may need more", f"ulimit -n {min(hard or 65536, 65536)}")


def _processors(section: Section) -> None:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota()
    threads = os.environ.get("OMP_NUM_THREADS")
    section.facts["processors"] = {"machine": os.cpu_count(), "usable": usable, "cgroup": quota, "omp_num_threads": threads}
    fit = usable if quota is None else min(usable, max(1, int(quota)))
    if threads is not None and not (threads.isdigit() and int(threads) > 0):
        section.problem(f"OMP_NUM_THREADS={threads!r} is no number above 0", f"export OMP_NUM_THREADS={fit}, or unset it")
    elif threads is not None and int(threads) > fit:
        section.warn(
            f"OMP_NUM_THREADS={threads}, and this process may use {fit} processor(s)", f"export OMP_NUM_THREADS={fit}, or unset it"
        )
    elif threads is None and fit < usable:
        section.warn(
            f"the container may use {quota:g} processor(s) and sees {usable}: torch would start {usable} threads",
            f"export OMP_NUM_THREADS={fit}",
        )


def _memory(section: Section) -> None:
    facts: dict[str, int | None] = {"total_mib": None, "available_mib": None, "cgroup_mib": None, "cgroup_free_mib": None}
    section.facts["memory"] = facts
    try:
        lines = (_PROC / "meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    total, left = kib["MemTotal"] // 1024, kib.get("MemAvailable", kib["MemFree"]) // 1024
    facts["total_mib"], facts["available_mib"] = total, left
    limit = _cgroup("memory", "memory.max", "memory.limit_in_bytes")
    if limit is not None and limit // MIB < total:  # no limit is a huge number in version 1
        used = _cgroup("memory", "memory.current", "memory.usage_in_bytes") or 0
        free = max(0, limit - used) // MIB
        facts["cgroup_mib"], facts["cgroup_free_mib"] = limit // MIB, free
        left = min(left, free)
    if left * MIB < _MEMORY:
        section.warn(f"{left} MiB of memory are available", "end other programs, or give the container more")


# --- cgroups: https://docs.kernel.org/admin-guide/cgroup-v2.html ---------------------------------------------------------


def _cgroup_file(controller: str, name: str, version_1: str) -> str | None:
    """A file of this process's control group, version 2 or 1; in a container its own group is the root that it sees."""
    try:
        lines = [line.split(":", 2) for line in (_PROC / "self/cgroup").read_text().splitlines()]
    except OSError:
        return None
    mine = {key: path.lstrip("/") for _, controllers, path in lines for key in controllers.split(",")}
    group, group_1 = mine.get("", ""), mine.get(controller, "")
    places = [_CGROUP / group / name, _CGROUP / name]
    places += [_CGROUP / controller / group_1 / version_1, _CGROUP / controller / version_1]
    for place in places:
        try:
            return place.read_text().strip()
        except OSError:
            continue
    return None


def _cgroup(controller: str, name: str, version_1: str) -> int | None:
    text = _cgroup_file(controller, name, version_1)
    return int(text) if text is not None and text.isdigit() else None  # "max": no limit


def _cpu_quota() -> float | None:
    """Processors that the control group may use at a time."""
    text = _cgroup_file("cpu", "cpu.max", "cpu.cfs_quota_us")
    if text is None:
        return None
    quota, _, period = text.partition(" ")
    if not quota.isdigit():
        return None  # "max", and -1 in version 1
    return int(quota) / int(period or _cgroup_file("cpu", "cpu.max", "cpu.cfs_period_us") or 100_000)
