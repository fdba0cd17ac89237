"""End a rank whose backward waits for the futures of ``reduce_bucket``, which have no timeout.

A future's callback that waits for a collective blocks one of gloo's two threads. If both are
blocked, the collective never starts, so its own timeout never begins either.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from geartrain import Run, TrainingError
from geartrain.parallel import report

#: Seconds that a collective has to report its own timeout first.
_GRACE = 5.0


@contextmanager
def limited(run: Run, seconds: float) -> Iterator[None]:
    """End this process if the block takes longer than the strategy's timeout.

    The main thread waits in C++, so no exception can be raised there.
    """
    timer = threading.Timer(seconds + min(seconds, _GRACE), _end, [run, seconds])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end(run: Run, seconds: float) -> None:
    error = TrainingError(
        f"{run.hooks.implementers('reduce_bucket')[0].label}: rank {run.world.rank} waits for the "
        f"futures of reduce_bucket for more than --strategy.timeout {seconds:g}. "
        "Fix: do not wait for a collective in a future's callback"
    )
    report(error)
    print(f"geartrain: {error}", file=sys.stderr, flush=True)
    os._exit(1)  # of the Workers, on rank 0: it ends the other ranks, too
