"""Read a duration, as of ``max_time`` and ``val_check_interval``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta

from geartrain import UsageError

#: Types of a duration.
Duration = str | float | timedelta | Mapping[str, float]


def seconds(name: str, duration: Duration) -> float:
    """Return a duration in seconds.

    Args:
        name: the argument, for errors.
        duration: ``"DD:HH:MM:SS"``, seconds, a ``timedelta``, or its arguments such as
            ``{"hours": 2, "minutes": 30}``.

    Raises:
        UsageError: the duration cannot be read, or is not above 0.
    """
    remedy = (
        "Fix: 'DD:HH:MM:SS', seconds, a timedelta, or a mapping such as {'hours': 2, 'minutes': 30}"
    )
    try:
        if isinstance(duration, str):
            clock = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", duration.strip())
            days, hours, minutes, last = (
                map(int, clock.groups()) if clock else (0, 0, 0, float(duration))
            )
            found = ((days * 24 + hours) * 60 + minutes) * 60 + float(last)
        elif isinstance(duration, timedelta):
            found = duration.total_seconds()
        elif isinstance(duration, Mapping):
            found = timedelta(**duration).total_seconds()
        elif isinstance(duration, bool):
            raise TypeError
        else:
            found = float(duration)
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"{name}={duration!r} cannot be read. {remedy}") from None
    if not 0 < found < float("inf"):
        raise UsageError(f"{name}={duration!r} must be above 0. {remedy}")
    return found
