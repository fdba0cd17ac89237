"""Ask accelerators if they can be used here, and find hardware without one. Imports no torch."""

from __future__ import annotations

import inspect
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from geartrain.errors import UsageError, warn

#: Linux: the driver lists its GPUs here, a folder each; a container sees its own.
_DRIVER = Path("/proc/driver/nvidia/gpus")
#: WSL 2 has the library of Windows' driver, and no /proc/driver/nvidia.
_WSL = Path("/usr/lib/wsl/lib/libnvidia-ml.so.1")
#: torch's settings of the whole process that a probe must not change: name -> getter, setter.
_SETTINGS = {
    "default dtype": ("get_default_dtype", "set_default_dtype"),
    "default device": ("get_default_device", "set_default_device"),
    "number of threads": ("get_num_threads", "set_num_threads"),
    "deterministic mode": ("get_deterministic_debug_mode", "set_deterministic_debug_mode"),
}
#: ``redirect_stdout`` replaces the stdout of all threads.
_one_probe = threading.RLock()


@contextmanager
def isolated(label: str) -> Iterator[None]:
    """Limit the effects of a plugin that is probed though nobody selected it.

    Its output goes to stderr, torch's settings are restored, and a slow plugin is named.
    """
    torch = sys.modules.get("torch")  # a probe may import torch, which takes seconds
    readers = {name: getattr(torch, get) for name, (get, _) in _SETTINGS.items()} if torch else {}
    before, start = {name: read() for name, read in readers.items()}, time.perf_counter()
    with _one_probe, redirect_stdout(sys.stderr):
        yield
    seconds = time.perf_counter() - start
    changed = [name for name, read in readers.items() if read() != before[name]]
    for name in changed:
        # None removes the mode by which torch applies another default device.
        value = None if str(before[name]) == "cpu" else before[name]
        getattr(torch, _SETTINGS[name][1])(value)
    effects = [f"changed torch's {' and '.join(changed)}, which geartrain undid"] if changed else []
    if torch and seconds > 1:
        effects.append(f"took {seconds:.1f} s")
    if effects:
        message = f"{label} {', and '.join(effects)} when it was probed"
        warn(f"{message}. Fix: --block {label}, or report it to its author")


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
    except BaseException as error:  # a driver's binding may fail in any way, sys.exit included
        if isinstance(error, KeyboardInterrupt):
            raise
        method, hint = inspect.getattr_static(accelerator, question, None), ""
        needs_self = inspect.isclass(accelerator) and inspect.isfunction(method)
        if needs_self and type(error) is TypeError:
            hint = ". Fix: make it a @staticmethod, for it is asked before any object is made"
        message = f"{type(error).__name__}: {error}{hint}"
        raise UsageError(f"its {question}() raised {message}") from error


def visible_devices() -> dict[str, str]:
    """Return visible hardware: accelerator -> description, to name plugins that are not installed.

    It may miss hardware, and may return hardware that cannot be used.
    """
    found = {}
    if gpu := _nvidia():
        found["cuda"] = gpu
    if sys.platform == "darwin" and platform.machine() == "arm64":
        found["mps"] = "an Apple GPU"
    return found


def _nvidia() -> str:
    if sys.platform == "win32":
        windows = os.environ.get("SYSTEMROOT", r"C:\Windows")
        return "an NVIDIA driver" if Path(windows, "System32", "nvml.dll").exists() else ""
    try:
        count = len(os.listdir(_DRIVER))
    except OSError:
        count = 0
    if count:
        return "an NVIDIA GPU" if count == 1 else f"{count} NVIDIA GPUs"
    return "an NVIDIA driver" if _WSL.exists() else ""
