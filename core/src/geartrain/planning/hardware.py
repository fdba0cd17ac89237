"""Ask accelerators whether they can be used here, and look for hardware without one. Imports neither torch nor a driver's library."""

from __future__ import annotations

import inspect
import os
import platform
import sys
from pathlib import Path
from typing import Any

from geartrain.errors import UsageError

#: Linux: the driver lists its GPUs here, a folder each; containers that were given GPUs see theirs.
_DRIVER = Path("/proc/driver/nvidia/gpus")
#: WSL 2: Windows lends its driver's library, and there is no /proc/driver/nvidia.
_WSL = Path("/usr/lib/wsl/lib/libnvidia-ml.so.1")


def ask(accelerator: Any) -> str | None:
    """Return why an accelerator (its class, or an object) cannot be used here; ``None`` if it can.

    Raises:
        UsageError: one of its three answers is missing, raises (the cause is attached) or is of the wrong form.
    """
    reason = _answer(accelerator, "unavailable") if hasattr(accelerator, "unavailable") else None
    if reason is not None and (not isinstance(reason, str) or not reason.strip()):
        raise UsageError(
            f"its unavailable() returned {reason!r}, which is neither None nor a reason in words"
        )
    missing = [
        name
        for name in ("priority", "unavailable", "device_count")
        if not hasattr(accelerator, name)
    ]
    if missing:
        raise UsageError(
            f"an accelerator needs priority, unavailable() and device_count(); it has no {', '.join(missing)}"
        )
    priority_of(accelerator)
    if reason is not None:
        return str(reason)
    count = _answer(accelerator, "device_count")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UsageError(
            f"its device_count() returned {count!r}, which is no whole number above 0, though unavailable() returned None"
        )
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
    except BaseException as error:  # a driver's binding may fail in any way, sys.exit included
        if isinstance(error, KeyboardInterrupt):
            raise
        plain = inspect.isclass(accelerator) and inspect.isfunction(
            inspect.getattr_static(accelerator, question, None)
        )
        hint = (
            ". Fix: make it a @staticmethod, for it is asked before any object is made"
            if plain and type(error) is TypeError
            else ""
        )
        raise UsageError(
            f"its {question}() raised {type(error).__name__}: {error}{hint}"
        ) from error


def visible() -> dict[str, str]:
    """Return visible hardware: accelerator -> description, so that ``accelerator="auto"`` can name a plugin that is not installed.

    Hardware may exist that is not found here, and hardware that is found need not be usable.
    """
    found = {}
    if gpu := _nvidia():
        found["cuda"] = gpu
    if sys.platform == "darwin" and platform.machine() == "arm64":
        found["mps"] = "an Apple GPU"
    return found


def _nvidia() -> str:
    if sys.platform == "win32":
        return (
            "an NVIDIA driver"
            if Path(os.environ.get("SYSTEMROOT", r"C:\Windows"), "System32", "nvml.dll").exists()
            else ""
        )
    try:
        count = len(os.listdir(_DRIVER))
    except OSError:
        count = 0
    if count:
        return "an NVIDIA GPU" if count == 1 else f"{count} NVIDIA GPUs"
    return "an NVIDIA driver" if _WSL.exists() else ""
