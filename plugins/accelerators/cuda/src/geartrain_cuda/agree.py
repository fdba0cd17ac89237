"""Give all ranks of a program the same answer of ``find_usable_cuda_devices``.

Each rank that geartrain starts runs the program again. By then the first process may occupy a GPU.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from geartrain.plugin_api import detect

#: The answers to the calls in the starting process, in order, which ranks inherit:
#: ``{"pid": 12, "calls": [{"n": 2, "devices": [0, 1]}]}``.
RECORD = "GEARTRAIN_CUDA_CHOSEN"
_KINDS: dict[str, type[Exception]] = {"RuntimeError": RuntimeError, "ValueError": ValueError}
_calls = 0


def agreed(n: int, find: Callable[[], list[int]]) -> list[int]:
    """Return the answer of ``find`` in the starting process, also in the ranks that it starts.

    Args:
        n: number of GPUs of the call; a rank compares it with the call of the starting process.
        find: finds the GPUs.

    Raises:
        RuntimeError: a launcher started several ranks on this node, and each would choose
            independently; or the starting process has no answer for this rank.
    """
    place = detect()
    if place is None or place.local_size == 1:
        return _choose(n, find)
    if place.launcher != "geartrain":
        raise RuntimeError(
            f"{place.launcher} started {place.local_size} processes on this node, and each would "
            "choose free GPUs independently, while the others occupy theirs. "
            "Fix: devices=[...], or set CUDA_VISIBLE_DEVICES to free ones before launching"
        )
    return _as_chosen(n, place.local_rank == 0)


def _choose(n: int, find: Callable[[], list[int]]) -> list[int]:
    try:
        devices = find()
    except (RuntimeError, ValueError) as error:
        # A program may catch the error and continue; its ranks must then do the same.
        kind = "ValueError" if isinstance(error, ValueError) else "RuntimeError"
        _keep({"n": n, "error": str(error), "kind": kind})
        raise
    _keep({"n": n, "devices": devices})
    return devices


def _keep(call: dict[str, Any]) -> None:
    os.environ[RECORD] = json.dumps({"pid": os.getpid(), "calls": [*_recorded(os.getpid()), call]})


def _as_chosen(n: int, starter: bool) -> list[int]:
    """Return the recorded answer for this call.

    The nth call in a rank gets the answer of the nth call in the starting process. After the ranks
    have started, the first process can no longer pass answers to them. So a later call returns the
    answer of the last call with the same ``n``, also in the first process.
    """
    global _calls
    calls = _recorded(os.getpid() if starter else os.getppid())
    _calls += 1
    if not starter and _calls <= len(calls):
        answer = calls[_calls - 1]
        if answer["n"] != n:
            raise RuntimeError(
                f"call {_calls} of find_usable_cuda_devices asks for {n} in this rank, and asked "
                f"for {answer['n']} in the process that started it. "
                "Fix: run the same calls in every rank"
            )
    else:
        same = [call for call in calls if call["n"] == n and "devices" in call]
        if not same:
            raise RuntimeError(
                f"find_usable_cuda_devices({n}) is called for the first time after the ranks were "
                "started, and each would choose independently. Fix: call it before the first fit"
            )
        answer = same[-1]
    if "error" in answer:
        raise _KINDS[answer["kind"]](answer["error"])
    return list(answer["devices"])


def _recorded(pid: int) -> list[dict[str, Any]]:
    """Return the calls of process ``pid``; none if the record is of another program's process."""
    try:
        record = json.loads(os.environ.get(RECORD, ""))
        return list(record["calls"]) if record["pid"] == pid else []
    except (ValueError, KeyError, TypeError):
        return []
