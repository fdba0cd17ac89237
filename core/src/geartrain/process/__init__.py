"""Worker processes: start them, watch them, report the first error, leave no orphan.

- ``environment``: who started this process, and which rank it is.
- ``relaunch``: the command line that starts another rank of this program.
- ``bootstrap``: what runs first in a started process; it dies with its starter.
- ``workers``: starts the other local ranks and supervises them while this process works as one of them.
- ``rendezvous``: the store through which ranks meet.
"""

from __future__ import annotations

import json
import os
import time
import traceback


def report(error: BaseException) -> None:
    """Write a rank's error where its starter looks for it: now, before teardown closes connections and others fail for it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return
    text = "".join(traceback.format_exception(error)).rstrip()
    # The format of torch.distributed.elastic.multiprocessing.errors, which torchrun reads too.
    told = {
        "message": f"{type(error).__name__}: {error}\n{text}",
        # torchrun's agent ends with an error of its own where the timestamp is not whole seconds; ``when`` is ours.
        "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time())), "when": time.time()},
    }
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": told}, file)
    except OSError:
        pass  # the log has it as well
