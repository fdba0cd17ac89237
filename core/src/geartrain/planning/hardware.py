"""Ask accelerators if they can be used here, and find hardware without one. Imports no torch."""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from geartrain.errors import UsageError

#: Linux: the driver lists its GPUs here, a folder each; a container sees its own.
_DRIVER = Path("/proc/driver/nvidia/gpus")
#: WSL 2 has the library of Windows' driver, and no /proc/driver/nvidia.
_WSL = Path("/usr/lib/wsl/lib/libnvidia-ml.so.1")
#: ``redirect_stdout`` replaces the stdout of all threads.
_one_probe = threading.RLock()


@contextmanager
def printing_to_stderr() -> Iterator[None]:
    """Send what a plugin prints to stderr while it is probed: nobody selected it."""
    with _one_probe, redirect_stdout(sys.stderr):
        yield


def reason_unusable(accelerator: Any) -> str | None:
    """Return why an accelerator (its class, or an object) cannot be used here; ``None`` if it can.

    Raises:
        UsageError: ``priority``, ``unavailable()`` or ``device_count()`` is missing, raises (the
            cause is attached) or has a wrong result.
    """
    reason = _answer(accelerator, "unavailable") if hasattr(accelerator, "unavailable") else None
    if reason is not None and (not isinstance(reason, str) or not reason.strip()):
        message = "which is neither None nor a reason in words"
        raise UsageError(f"its unavailable() returned {reason!r}, {message}")
    needed = ("priority", "unavailable", "device_count")
    missing = ", ".join(name for name in needed if not hasattr(accelerator, name))
    if missing:
        message = "an accelerator needs priority, unavailable() and device_count()"
        raise UsageError(f"{message}; it has no {missing}")
    priority_of(accelerator)
    if reason is not None:
        return str(reason)
    count = _answer(accelerator, "device_count")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        message = "which is no whole number above 0, though unavailable() returned None"
        raise UsageError(f"its device_count() returned {count!r}, {message}")
    return None


def priority_of(accelerator: Any) -> float:
    """Return an accelerator's priority.

    Raises:
        UsageError: it is no number.
    """
    priority = getattr(accelerator, "priority", None)
    if isinstance(priority, bool) or not isinstance(priority, int | float) or priority != priority:
        raise UsageError(f"its priority is {priority!r}, which is no number")
    return priority


def _answer(accelerator: Any, question: str) -> Any:
    try:
        return getattr(accelerator, question)()
    except Exception as error:  # a driver's binding may fail in any way
        message = f"{type(error).__name__}: {error}"
        raise UsageError(f"its {question}() raised {message}") from error


def visible_devices() -> dict[str, str]:
    """Return visible hardware: accelerator -> description, to name plugins that are not installed.

    It may miss hardware, and may return hardware that cannot be used.
    """
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return {"mps": "an Apple GPU"}
    windows = Path(os.environ.get("SYSTEMROOT", ""), "System32", "nvml.dll")
    has_driver = any(_DRIVER.glob("*")) or _WSL.exists() or windows.exists()
    return {"cuda": "an NVIDIA GPU"} if has_driver else {}
