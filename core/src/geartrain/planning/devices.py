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
    forms = _FORMS if indexed else _COUNT_FORMS

    def refusal(message: str, hint: str = forms) -> UsageError:
        return UsageError(f"devices={devices!r}{message}. Fix: {hint}")

    value = _parse_string(devices.strip()) if isinstance(devices, str) else devices
    if isinstance(value, str) and value == "auto":
        value = -1 if indexed else 1
    elif isinstance(value, int) and value == -1 and not indexed:
        raise refusal(f" (all of them) means nothing on {accelerator}")
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= -1
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
    if is_list and value and not indexed:
        raise refusal(f": a list of indices means nothing on {accelerator}")
    if not is_count and not (is_list and all(_is_index(index) for index in value)):
        match = re.fullmatch(r"\s*[a-z]+:(\d+)\s*", devices) if isinstance(devices, str) else None
        hint = f' (for the device of index {match[1]}: "{match[1]},")' if match and indexed else ""
        raise refusal(f" is no number or list of devices of {accelerator}", forms + hint)
    if not value if is_list else value == 0:
        raise refusal(" asks for zero devices")
    if not indexed:
        most = max(_PROCESSES, _PROCESSES_A_CORE * available)
        if value > most:
            message = f" asks for {value} processes on a machine of {available} core(s)"
            hint = f"devices={available}, the number of cores, or fewer"
            raise refusal(f"{message}, which starts {most} at most", hint)
        return list(range(value))
    visible = f"only {list(range(available))} are visible on {accelerator}"
    if not is_list:
        if available == 0:
            raise UsageError(f"devices={devices!r}: no {accelerator} device is visible.")
        if value > available:
            raise UsageError(f"devices={devices!r}: asked for {value}, {visible}.")
        return list(range(available if value == -1 else value))
    for index in value:
        if (times := value.count(index)) > 1:
            raise refusal(f": {index} is given {times} times", "name each device once")
        if index >= available:
            raise UsageError(f"devices={devices!r}: asked for {index}, {visible}.")
    return list(value)


def _parse_string(text: str) -> Any:
    """Return a number, a list of indices, or the text."""
    if re.fullmatch(r"[+-]?\d{1,18}", text, re.ASCII):
        return int(text)
    if re.fullmatch(r"(\d{1,9}\s*(,\s*\d{1,9}\s*)*,?)?", text, re.ASCII):
        return [int(part) for part in text.split(",") if part.strip()]
    return text


def _is_index(index: Any) -> bool:
    return isinstance(index, int) and not isinstance(index, bool) and index >= 0
