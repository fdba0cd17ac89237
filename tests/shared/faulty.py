"""Faults for programs that a test starts as ``PROGRAM KIND RANK WHERE``.

The program fails in this way, on this rank and in this place. Each rank writes marker files to the
directory ``marks``.
"""

import os
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

import geartrain as gt

KIND, RANK, WHERE = sys.argv[1], int(sys.argv[2]), sys.argv[3]
MARKS = Path("marks")
MARKS.mkdir(exist_ok=True)
#: Seconds for which a rank waits for a late rank.
PATIENCE = 3.0
_NEXT = (RANK + 1) % int(os.environ.get("DEVICES", "2"))


def mine() -> int:
    return int(os.environ.get("RANK", "0"))


def mark(what: str, text: str = "") -> None:
    (MARKS / f"{what}-{mine()}").write_text(text)


def fault(where: str) -> None:
    """Fail if this is the place and the rank. The next rank waits for a hung or stopped rank."""
    if where != WHERE:
        return
    late = KIND in ("hang", "late")
    group = _impatient_group() if late else None
    if mine() != RANK:
        if late and mine() == _NEXT:
            dist.barrier(group)
        return
    mark("fault")
    if KIND == "exception":
        raise KeyError("my own error")
    if KIND == "leave":
        sys.exit(0)
    if KIND == "none":
        return
    if KIND != "hang":
        os.kill(os.getpid(), signal.SIGSTOP if late else getattr(signal, KIND))
    threading.Event().wait()


def _impatient_group() -> dist.ProcessGroup:
    """Return a group of the failing rank and the next, with a shorter timeout than the strategy's.

    The strategy's timeout must be longer, because ranks on a busy machine start at different times.
    """
    dist.barrier()
    group = dist.new_group([RANK, _NEXT], timeout=timedelta(seconds=PATIENCE))
    if mine() in (RANK, _NEXT):
        dist.barrier(group)  # connects the two ranks
    return group


class Watch:
    @gt.hookimpl
    def on_exception(self, run, error):
        mark("on_exception")
