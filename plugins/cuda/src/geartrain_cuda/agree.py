"""One answer for all ranks of a program: a rank that geartrain started runs the program again, when the first may occupy its GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from geartrain.plugin_api import detect

#: What the calls of the starting process gave, in order; ranks inherit it: ``{"pid": 12, "calls": [{"n": 2, "devices": [0, 1]}]}``.
RECORD = "GEARTRAIN_CUDA_CHOSEN"
_KINDS: dict[str, type[Exception]] = {"RuntimeError": RuntimeError, "ValueError": ValueError}
_calls = 0


def agreed(n: int, find: Callable[[], list[int]]) -> list[int]:
    """What ``find`` gives in the process that starts the others, and in every rank that it starts.

    Args:
        n: what was asked for; a call that asks for something else is another call.

    Raises:
        RuntimeError: a launcher started several ranks on this node, each of which would choose for itself; or this rank has no answer
            of the starting process to go by.
    """
    place = detect()
    if place is None or place.local_size == 1:
        return _choose(n, find)
    if place.launcher != "geartrain":
        raise RuntimeError(
            f"{place.launcher} started {place.local_size} processes on this node, and each would choose free GPUs for itself, while the "
            "others take theirs. Fix: devices=[...], or set CUDA_VISIBLE_DEVICES to free ones before launching"
        )
    return _as_chosen(n, place.local_rank == 0)


def _choose(n: int, find: Callable[[], list[int]]) -> list[int]:
    try:
        devices = find()
    except (
        RuntimeError,
        ValueError,
    ) as error:  # a program may catch it and go on; its ranks then do the same
        _keep(
            {
                "n": n,
                "error": str(error),
                "kind": "ValueError" if isinstance(error, ValueError) else "RuntimeError",
            }
        )
        raise
    _keep({"n": n, "devices": devices})
    return devices


def _keep(call: dict[str, Any]) -> None:
    os.environ[RECORD] = json.dumps({"pid": os.getpid(), "calls": [*_recorded(os.getpid()), call]})


def _as_chosen(n: int, starter: bool) -> list[int]:
    """The nth call's answer in the nth call. Once the ranks exist, none can be told what the first process finds from then on: a later
    call gives what the last one that asked for as many gave, in the first process too."""
    global _calls
    calls = _recorded(os.getpid() if starter else os.getppid())
    _calls += 1
    if not starter and _calls <= len(calls):
        answer = calls[_calls - 1]
        if answer["n"] != n:
            raise RuntimeError(
                f"call {_calls} of find_usable_cuda_devices asks for {n} in this rank, and asked for {answer['n']} in the process that "
                "started it. Fix: let every rank run the same calls"
            )
    else:
        same = [call for call in calls if call["n"] == n and "devices" in call]
        if not same:
            raise RuntimeError(
                f"find_usable_cuda_devices({n}) is called for the first time after the ranks were started, and each would choose for "
                "itself. Fix: call it before the first fit"
            )
        answer = same[-1]
    if "error" in answer:
        raise _KINDS[answer["kind"]](answer["error"])
    return list(answer["devices"])


def _recorded(pid: int) -> list[dict[str, Any]]:
    """The calls of process ``pid``; none where the record is another's, which some program around this one left."""
    try:
        record = json.loads(os.environ.get(RECORD, ""))
        return list(record["calls"]) if record["pid"] == pid else []
    except (ValueError, KeyError, TypeError):
        return []
