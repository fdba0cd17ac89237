"""Read ``devices=``. Imports no torch and uses no device."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from geartrain.errors import UsageError

#: Allowed processes on one node: the larger of the first number and the second for each core.
_PROCESSES, _PROCESSES_A_CORE = 64, 4

_FORMS = 'a number (2, "2"), a list of indices ([0, 2], "0,2", "2,"), -1 or "auto"'
_COUNT_FORMS = 'a number of processes (2, "2") or "auto"'


def parse_devices(
    devices: Any, *, accelerator: str, available: int, indexed: bool = True
) -> list[int]:
    """Turn ``devices=`` into device indices on each node.

    Args:
        devices: an int, a string, a list, tuple or range of indices, or ``"auto"``.
        accelerator: its name, for errors.
        available: the devices of this node; their indices are from 0.
        indexed: True if devices have indices. The cpu has none: a number is a number of processes,
            which may be more than ``available``, and ``"auto"`` is 1.

    Returns:
        Distinct indices in the order given, at least one.

    Raises:
        UsageError: anything else; the message has the accepted forms.
    """
    value = devices.strip() if isinstance(devices, str) else devices
    if isinstance(value, str):
        value = _parse_string(value, devices, accelerator, indexed)
    if isinstance(value, str):  # "auto" is the only string left
        value = -1 if indexed else 1
    elif isinstance(value, int) and value == -1 and not indexed:
        message = f"devices={devices!r} (all of them) means nothing on {accelerator}"
        raise UsageError(f"{message}. Fix: {_COUNT_FORMS}")
    if isinstance(value, bool | bytes | bytearray) or not isinstance(value, int | Sequence):
        raise _malformed(devices, accelerator, indexed)
    if isinstance(value, int):
        return _count(value, devices, accelerator, available, indexed)
    if not indexed:
        message = f"devices={devices!r}: a list of indices means nothing on {accelerator}"
        raise UsageError(f"{message}. Fix: {_COUNT_FORMS}")
    return _indices(list(value), devices, accelerator, available)


def _parse_string(text: str, devices: Any, accelerator: str, indexed: bool) -> Any:
    if text == "auto":
        return text
    if re.fullmatch(r"[+-]?\d{1,18}", text, re.ASCII):
        return int(text)
    if text == "":
        return []
    if re.fullmatch(r"\d{1,9}\s*(,\s*\d{1,9}\s*)*,?", text, re.ASCII):
        return [int(part) for part in text.split(",") if part.strip()]
    raise _malformed(devices, accelerator, indexed)


def _count(count: int, devices: Any, accelerator: str, available: int, indexed: bool) -> list[int]:
    if count == 0:
        forms = _FORMS if indexed else _COUNT_FORMS
        raise UsageError(f"devices={devices!r} asks for zero devices. Fix: {forms}")
    if count < -1:
        raise _malformed(devices, accelerator, indexed)
    if not indexed:
        most = max(_PROCESSES, _PROCESSES_A_CORE * available)
        if count > most:
            raise UsageError(
                f"devices={devices!r} asks for {count} processes on a machine of {available} "
                f"core(s), which starts {most} at most. "
                f"Fix: devices={available}, the number of cores, or fewer"
            )
        return list(range(count))
    if available == 0:
        raise UsageError(f"devices={devices!r}: no {accelerator} device is visible.")
    wanted = available if count == -1 else count
    if wanted > available:
        raise _not_visible(wanted, devices, accelerator, available)
    return list(range(wanted))


def _indices(indices: list[Any], devices: Any, accelerator: str, available: int) -> list[int]:
    if not indices:
        raise UsageError(f"devices={devices!r} asks for zero devices. Fix: {_FORMS}")
    if any(isinstance(index, bool) or not isinstance(index, int) or index < 0 for index in indices):
        raise _malformed(devices, accelerator, True)
    for index in indices:
        if indices.count(index) > 1:
            message = f"{index} is given {indices.count(index)} times"
            raise UsageError(f"devices={devices!r}: {message}. Fix: name each device once")
        if index >= available:
            raise _not_visible(index, devices, accelerator, available)
    return indices


def _not_visible(wanted: int, devices: Any, accelerator: str, available: int) -> UsageError:
    message = f"only {list(range(available))} are visible on {accelerator}"
    return UsageError(f"devices={devices!r}: asked for {wanted}, {message}.")


def _malformed(devices: Any, accelerator: str, indexed: bool) -> UsageError:
    match = re.fullmatch(r"\s*[a-z]+:(\d+)\s*", devices) if isinstance(devices, str) else None
    hint = f' (for the device of index {match[1]}: "{match[1]},")' if match and indexed else ""
    forms = _FORMS if indexed else _COUNT_FORMS
    return UsageError(
        f"devices={devices!r} is no number or list of devices of {accelerator}. Fix: {forms}{hint}"
    )
