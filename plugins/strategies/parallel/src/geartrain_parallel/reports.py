"""Record the failure of this rank's run, and write it to the file that its supervisor reads."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from geartrain.plugin_api import ClusterEnvironment
from geartrain_parallel.failures import is_connection

#: The environment variable that names the file for a rank's error, the same as torchelastic's.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


@dataclass(slots=True)
class _OwnRun:
    """The state of this process's run."""

    #: Shuts down the run's connections to other ranks.
    disconnect: Callable[[], None] | None = None
    #: The time of the failure, before teardown, in seconds since the epoch.
    failed_at: float | None = None
    #: True after ``on_exception`` and ``teardown`` have run: the rank only leaves its group.
    is_leaving: bool = False


_run = _OwnRun()


def begin(disconnect: Callable[[], None] | None = None) -> None:
    """Start a run, and forget the failure of an earlier run that the program survived.

    Args:
        disconnect: shuts down the run's connections to other ranks.
    """
    global _run
    _run = _OwnRun(disconnect)


def report(error: BaseException) -> None:
    """Record when this rank failed, and write its error for its supervisor.

    Call it before teardown, which makes other ranks fail, too. The first error of a run stays. The
    error of a later run replaces it, but not on a rank that geartrain has started: geartrain ends
    its ranks after a failed run, and the rest of their program only loses its connections.
    """
    if _run.failed_at is not None:
        return
    _run.failed_at = time.time()
    path = os.environ.get(ERROR_FILE)
    if not path or (
        os.environ.get(ClusterEnvironment.started_by) == str(os.getpid()) and os.path.exists(path)
    ):
        return
    text = "".join(traceback.format_exception(error)).rstrip()
    # The format of torch.distributed.elastic.multiprocessing.errors. torchrun calls the earliest
    # error the root cause, and reads whole seconds only. A lost connection may follow its cause
    # within the same second, so it is dated a second later. ``when`` is geartrain's.
    stamp = int(_run.failed_at) + is_connection(str(error))
    message = {
        "message": f"{type(error).__name__}: {error}\n{text}",
        "extraInfo": {"py_callstack": text, "timestamp": str(stamp), "when": _run.failed_at},
    }
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)  # it may have gone
        with open(f"{path}.part", "w", encoding="utf-8") as file:
            json.dump({"message": message}, file)
        os.replace(file.name, path)  # atomic, because the supervisor may read it at any time
    except OSError:
        pass  # the log has the error, too


def failed_at() -> float | None:
    """Return when this rank's run failed; ``None`` if it has not."""
    return _run.failed_at


def leave() -> None:
    """Record that plugins and modules have torn down, and the rank only leaves its group."""
    _run.is_leaving = True


def is_tearing_down() -> bool:
    """True after a failure while ``on_exception`` and ``teardown`` hooks are still running."""
    return _run.failed_at is not None and not _run.is_leaving


def disconnect_if_failed() -> None:
    """Shut down this rank's connections if its run failed, to unblock peers in a collective.

    Closing them is not enough while a loader worker that this rank forked holds a copy.
    """
    if _run.failed_at is not None and _run.disconnect is not None:
        _run.disconnect()
