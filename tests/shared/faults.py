"""Checks of a program after one of its ranks failed. The program imports ``faulty``."""

import time
from pathlib import Path

from geartrain_testing.launching import Launched, until

#: Seconds until a program reaches its fault, and from the fault to its end.
STARTED, PROMPT = 60, 18


def ends_after_fault(run: Launched, folder: Path, rank: int, seconds: float = PROMPT) -> int:
    """Check that the run ends in time after the fault and leaves no process; return its code."""
    until(
        lambda: (folder / "marks" / f"fault-{rank}").exists() or run.process.poll() is not None,
        STARTED,
        "a fault",
    )
    began = time.monotonic()
    code = run.wait(seconds)
    assert (folder / "marks" / f"fault-{rank}").exists(), run.err
    until(
        lambda: not run.processes(),
        max(2.0, seconds - (time.monotonic() - began)),
        f"no process is left: {run.processes()}",
    )
    return code


def marks(folder: Path) -> set[str]:
    return {path.name for path in (folder / "marks").iterdir()}
