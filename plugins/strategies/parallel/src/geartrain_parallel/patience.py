"""Timeouts of a supervisor of ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from geartrain import UsageError

#: The environment variable that changes the defaults: ``GEARTRAIN_PATIENCE=grace=30,stopped=60``.
PATIENCE = "GEARTRAIN_PATIENCE"


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that a supervisor gives ranks."""

    #: After one rank has failed: time for the others to fail and to tear down.
    unwind: float = 3.0
    #: Between SIGTERM and SIGKILL to a rank.
    grace: float = 5.0
    #: For ``on_exception`` and ``teardown`` on the supervising rank, where loggers may upload data.
    teardown: float = 300.0
    #: For a rank that is stopped (SIGSTOP) while the others run.
    stopped: float = 15.0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Patience:
        """Return the defaults with the changes of ``GEARTRAIN_PATIENCE``.

        Raises:
            UsageError: an unknown name, or a value that is not a number above 0.
        """
        seconds, names = {}, [field.name for field in fields(cls)]
        for each in filter(None, environ.get(PATIENCE, "").split(",")):
            name, _, value = (part.strip() for part in each.partition("="))
            try:
                seconds[name] = float(value)
            except ValueError:
                seconds[name] = math.nan
            if name not in names or not seconds[name] > 0:
                raise UsageError(
                    f"{PATIENCE}: {each!r} is not NAME=SECONDS. "
                    f"Fix: seconds above 0 for {', '.join(names)}"
                )
        return cls(**seconds)
