"""Run functions on several ranks; see several_ranks.py.

``python rank_server.py`` reads one request per line and forks its ranks. This process has imported
torch and has one thread, so it forks a rank in milliseconds.
"""

import atexit
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo  # which torch's optimizers import when the first one is made
from warm import count_for_test

# Each rank would need a second for these.
import geartrain_port.names  # noqa: F401
from geartrain import Trainer
from geartrain_testing.launching import free_port

#: Seconds between two polls of the ranks; for the other ranks to end after one has failed; and for
#: processes that ranks started to end after them.
PERIOD, PATIENCE, GRACE = 0.005, 20.0, 5.0
#: This process's exit status, if it is a rank.
_status: int | None = None


def main() -> None:
    """Serve until the standard input ends."""
    prepare()
    os.fsync = lambda number: None  # as in conftest.py
    gc.freeze()  # so that garbage collection in a rank does not copy the shared memory
    for line in sys.stdin:
        request = json.loads(line)
        os.environ.clear()
        os.environ.update(request["environment"])
        if "deepspeed" in [*request["module"].split("."), *request["arguments"]]:
            os.environ["DS_ACCELERATOR"] = "cpu"
            with suppress(ImportError):  # each rank would need seconds for it
                importlib.import_module("deepspeed")
        try:
            function = getattr(importlib.import_module(request["module"]), request["function"])
        except Exception:
            print(json.dumps(traceback.format_exc()), flush=True)
            continue
        print(json.dumps(run(function, request, free_port())), flush=True)


def prepare() -> None:
    """Import all strategies, and read the metadata of distributions, as each rank would."""
    for entry in entry_points(group="geartrain.strategies"):
        entry.load()
    Trainer(accelerator="cpu", enable_progress_bar=False)


def run(function: Callable[..., Any], request: dict[str, Any], port: int) -> list[str]:
    """Fork the ranks and wait for them; return the end of each, as :func:`watch` does."""
    pids = []
    for rank in range(request["ranks"]):
        pid = os.fork()
        if pid == 0:
            become(rank, request, port)
            work(function, request["arguments"], rank)
        pids.append(pid)
    return watch(pids, time.monotonic() + request["seconds"])


def become(rank: int, request: dict[str, Any], port: int) -> None:
    """Prepare this process: a rank or node started by hand, or one process, in a folder."""
    os.setpgid(0, 0)
    count_for_test()
    os.chdir(request["folder"])
    ranks = str(request["ranks"])
    if request["place"] == "rank":
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=ranks,
            LOCAL_WORLD_SIZE=ranks,
            NODE_RANK="0",
        )
    elif request["place"] == "node":
        os.environ["NODE_RANK"] = str(rank)
    if request["place"] != "alone":
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    for name, descriptor in ((os.devnull, 0), (f"rank-{rank}.out", 1), (f"rank-{rank}.err", 2)):
        file = os.open(name, os.O_CREAT | os.O_RDWR | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    faulthandler.enable()  # SIGABRT prints the stack of a rank that hangs
    sys.argv = [request["function"]]


def work(function: Callable[..., Any], arguments: list[Any], rank: int) -> NoReturn:
    """Call the function, save its result or error, and end with the exit code of a program."""
    global _status
    try:
        _status = 1
        torch.save(function(*arguments), f"rank-{rank}.pt")
        _status = 0
    except BaseException as error:
        Path(f"rank-{rank}.error").write_text(f"{type(error).__name__}: {error}")
        if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
            _status = error.code or 0
        raise
    sys.exit()


@atexit.register
def end_at_once() -> None:
    """End a rank without the destruction of all objects, which takes half a second.

    This function is registered first, so all other ``atexit`` functions have run before it.
    """
    if _status is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status)


def watch(pids: list[int], deadline: float) -> list[str]:
    """Wait until all ranks and their child processes have ended; return exit codes or words.

    Ranks are ended at the deadline, and soon after one has failed, as launchers do.
    """
    ends = dict.fromkeys(pids, "")
    while left := [pid for pid, end in ends.items() if not end]:
        for pid in left:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                ends[pid] = str(os.waitstatus_to_exitcode(status))
                if status:
                    deadline = min(deadline, time.monotonic() + PATIENCE)
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGABRT)
                os.waitpid(pid, 0)
                ends[pid] = "did not end; its output has its stack"
        time.sleep(PERIOD)
    deadline = time.monotonic() + GRACE
    while left := [pid for pid in pids if has_left(pid)]:
        if time.monotonic() > deadline:
            for pid in left:
                ends[pid] += ", and left processes behind"
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            break
        time.sleep(PERIOD)
    return list(ends.values())


def has_left(pid: int) -> bool:
    """True if a process of this rank's group is alive."""
    with suppress(ProcessLookupError):
        os.killpg(pid, 0)
        return True
    return False


if __name__ == "__main__":
    main()
