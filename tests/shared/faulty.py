"""For programs that a test starts as ``PROGRAM KIND RANK WHERE``: fail in that way, on that rank, in that place.

Markers in the directory ``marks`` say what ran.
"""

import os
import signal
import sys
import threading
from pathlib import Path

import geartrain as gt
from geartrain.parallel import stopped

KIND, RANK, WHERE = sys.argv[1], int(sys.argv[2]), sys.argv[3]
MARKS = Path("marks")
MARKS.mkdir(exist_ok=True)
# A test about the timeout must not meet the end of the patience, nor wait for the whole of it.
stopped.PATIENCE = float(os.environ.get("PATIENCE", stopped.PATIENCE))


def mine() -> int:
    return int(os.environ.get("RANK", "0"))


def mark(what: str, text: str = "") -> None:
    (MARKS / f"{what}-{mine()}").write_text(text)


def fault(where: str) -> None:
    if where != WHERE or mine() != RANK:
        return
    mark("fault")
    if KIND == "exception":
        raise KeyError("my own error")
    if KIND == "leave":
        sys.exit(0)
    if KIND == "none":
        return
    if KIND != "hang":
        os.kill(os.getpid(), getattr(signal, KIND))
    threading.Event().wait()


class Watch:
    @gt.hookimpl
    def on_exception(self, run, error):
        mark("on_exception")
