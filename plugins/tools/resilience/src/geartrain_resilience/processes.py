"""The processes that a run left: found, asked to end, and ended."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
#: Seconds that a process has to end after SIGTERM, and helpers that clean up have to end.
_GRACE, _CLEAN_UP = 1.0, 5.0
#: Processes that remove shared memory when the last process that used it has ended.
_CLEANERS = (b"resource_tracker", b"torch_shm_manager")


def adopt_orphans(adopt: bool = True) -> None:
    """Become the parent of processes whose own parent ends below this one; Linux alone can."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def children() -> list[int]:
    """Return the ids of this process's children, also of those that it has adopted."""
    found: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def end_orphans(kept: Sequence[int] = ()) -> list[int]:
    """End the children of this process, and theirs; return the ids of those that were killed.

    Args:
        kept: children that stay.
    """
    began, asked, killed = time.monotonic(), set[int](), list[int]()
    while True:
        _reap(kept)
        remaining = [pid for pid in children() if pid not in kept]
        passed = time.monotonic() - began
        if not remaining or passed > _GRACE + _CLEAN_UP:
            return killed
        for pid in remaining:
            cleans_up = any(name in _command(pid) for name in _CLEANERS)
            if pid not in asked and not cleans_up:
                asked.add(pid)
                _send(pid, signal.SIGTERM)
                _send(pid, signal.SIGCONT)  # a stopped process handles no other signal
            if passed > (_CLEAN_UP if cleans_up else _GRACE):
                killed += [pid] if pid not in killed else []
                _send(pid, signal.SIGKILL)
        time.sleep(0.01)


def _reap(kept: Sequence[int]) -> None:
    for pid in children():
        if pid not in kept:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
