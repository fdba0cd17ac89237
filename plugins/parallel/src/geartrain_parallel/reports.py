"""The failure of this rank's own run: noted when it happens, and written where the rank's supervisor reads it."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from geartrain.plugin_api import STARTED_BY
from geartrain_parallel.failures import is_connection

#: The environment variable that names the file for a rank's error, the same as torchelastic's.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


@dataclass(slots=True)
class _OwnRun:
    """The state of this process's run."""

    #: Shuts down the connections to other ranks that the run has opened.
    disconnect: Callable[[], None] | None = None
    #: When the run failed, in seconds since the epoch: before teardown, which takes time.
    failed_at: float | None = None
    #: True after ``on_exception`` and ``teardown`` have run: the rank only has to leave its group.
    is_leaving: bool = False


_run = _OwnRun()


def begin(disconnect: Callable[[], None] | None = None) -> None:
    """Start a run: the failure of an earlier one, which the program survived, is past.

    Args:
        disconnect: shuts down the connections to other ranks that the run has opened.
    """
    global _run
    _run = _OwnRun(disconnect)


def report(error: BaseException) -> None:
    """Note when this rank failed, and write its error for its supervisor: before teardown, which makes other ranks fail too.

    The first error of a run stays. The error of a later run replaces it, but not on a rank that geartrain has started: geartrain ends its
    ranks after a run that failed, and the rest of the program only loses its connections.
    """
    if _run.failed_at is not None:
        return
    _run.failed_at = time.time()
    path = os.environ.get(ERROR_FILE)
    if not path or (os.environ.get(STARTED_BY) == str(os.getpid()) and os.path.exists(path)):
        return
    text = "".join(traceback.format_exception(error)).rstrip()
    # The format of torch.distributed.elastic.multiprocessing.errors. torchrun calls the earliest the root cause and takes whole
    # seconds only, within which a lost connection follows its cause: it is dated a second later. ``when`` is ours.
    stamp = int(_run.failed_at) + is_connection(str(error))
    message = {
        "message": f"{type(error).__name__}: {error}\n{text}",
        "extraInfo": {"py_callstack": text, "timestamp": str(stamp), "when": _run.failed_at},
    }
    try:
        with open(f"{path}.part", "w", encoding="utf-8") as file:
            json.dump({"message": message}, file)
        os.replace(file.name, path)  # never half of it: the supervisor looks at any moment
    except OSError:
        pass  # the log has it as well


def failed_at() -> float | None:
    """Return when this rank's run failed; ``None`` if it has not."""
    return _run.failed_at


def leave() -> None:
    """Note that plugins and modules have torn down: the rank only has to leave its group."""
    _run.is_leaving = True


def is_tearing_down() -> bool:
    """True after a failure while ``on_exception`` and ``teardown`` hooks are still running."""
    return _run.failed_at is not None and not _run.is_leaving


def disconnect_if_failed() -> None:
    """Shut down this rank's connections if its run failed: peers may be blocked in a collective with it, and hear nothing else.

    Closing is not enough while a loader worker, forked by this rank, holds a copy.
    """
    if _run.failed_at is not None and _run.disconnect is not None:
        _run.disconnect()
