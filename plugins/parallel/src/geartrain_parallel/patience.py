"""How long a supervisor of ranks waits, and for what."""

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

    #: After one rank has failed: for the others to fail too, and to tear down.
    unwind: float = 3.0
    #: Between asking a rank to end and killing it.
    grace: float = 5.0
    #: For ``on_exception`` and ``teardown`` on the rank that supervises: loggers hand over what they have.
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
                    f"{PATIENCE}: {each!r} is no NAME=SECONDS. Fix: seconds above 0 for {', '.join(names)}"
                )
        return cls(**seconds)
