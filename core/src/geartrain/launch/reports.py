"""Worker processes: start them, watch them, report the first error, leave no orphan.

- ``environment``: who started this process, and which rank it is.
- ``relaunch``: the command line that starts another rank of this program.
- ``bootstrap``: what runs first in a started process; it dies with its starter.
- ``forks``: what a forked child, such as a loader worker, must not keep of its rank.
- ``signals``: those that end a run raise an error in it; ``stopped``: ranks that somebody stops.
- ``failures``: decides which rank failed first and which is late; ``patience``: how long a supervisor waits.
- ``workers``: starts the other local ranks and supervises them while this process works as one of them.
- ``rendezvous``: the store through which ranks meet.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import traceback
from collections.abc import Callable

from geartrain.launch.cluster import STARTED_BY

#: Where a worker writes its error, as torchelastic's workers do.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
#: When this rank's run failed, in seconds since the epoch: before teardown, which takes time.
_failed: list[float] = []
#: The file that this process has written an error to.
_reported = ""
#: True after ``on_exception`` and ``teardown`` have run: the rank only has to leave its group.
_leaving = False
#: Shuts down the connections that this rank's run has opened to others.
_disconnect: Callable[[], None] | None = None


def begin(disconnect: Callable[[], None] | None = None) -> None:
    """Start a run: the failure of an earlier one, which the program survived, is past.

    Args:
        disconnect: shuts down the connections to other ranks that the run has opened.
    """
    global _leaving, _disconnect, _reported
    _failed.clear()
    _leaving, _disconnect = False, disconnect
    # A file that this process has not written is not geartrain's to delete.
    # geartrain ends all of its ranks after a run that failed: the first error stays, also if the program survived it on this rank.
    if _reported and os.environ.get(STARTED_BY) != str(os.getpid()):
        with contextlib.suppress(OSError):
            os.unlink(_reported)
        _reported = ""


def report(error: BaseException) -> None:
    """Note when this rank failed, and write its error where its starter looks for it: now, before teardown closes connections and
    others fail for it."""
    global _reported
    _failed.append(time.time())
    path = os.environ.get(ERROR_FILE)
    if not path or os.path.exists(path):
        return
    text = "".join(traceback.format_exception(error)).rstrip()
    # The format of torch.distributed.elastic.multiprocessing.errors. torchrun calls the earliest the root cause and takes whole
    # seconds only, within which a lost connection follows its cause: it is dated a second later. ``when`` is ours.
    stamp = int(_failed[0]) + is_connection(str(error))
    told = {
        "message": f"{type(error).__name__}: {error}\n{text}",
        "extraInfo": {"py_callstack": text, "timestamp": str(stamp), "when": _failed[0]},
    }
    try:
        with open(f"{path}.part", "w", encoding="utf-8") as file:
            json.dump({"message": told}, file)
        os.replace(file.name, path)  # never half of it: the starter looks at any moment
        _reported = path
    except OSError:
        pass  # the log has it as well


def failed_at() -> float:
    """When this rank's run failed; now, where it never said so."""
    return _failed[0] if _failed else time.time()


def has_failed() -> bool:
    """Whether this rank's run has failed; then it is tearing down."""
    return bool(_failed)


def leave() -> None:
    """Plugins and modules have torn down; what is left is to leave the group."""
    global _leaving
    _leaving = True


def disconnect_if_failed() -> None:
    """Shut down this rank's connections if its run failed: peers may be blocked in a collective with it, and hear nothing else.

    Closing is not enough while a loader worker, forked by this rank, holds a copy.
    """
    if _failed and _disconnect is not None:
        _disconnect()


def is_telling() -> bool:
    """Whether this rank has failed, and plugins and modules are being told, which may take them a while."""
    return bool(_failed) and not _leaving


def is_connection(message: str) -> bool:
    """Whether an error's message is that of a collective whose peer has gone."""
    return any(word in message.lower() for word in ("connection", "gloo", "nccl", "peer", "timed out", "socket"))


def is_timeout(message: str) -> bool:
    """Whether an error's message says that a rank waited for others in vain: gloo's and the store's do, a loader's own does not."""
    return re.search("timed out (after .* )?waiting", message.partition("\n")[0].lower()) is not None
