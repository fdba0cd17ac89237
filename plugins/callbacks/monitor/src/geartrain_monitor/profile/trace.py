"""The trace: a few steps of every rank by ``torch.profiler``, merged on one timeline.

The format is Chrome's: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import profile, record_function, schedule

from geartrain.plugin_api import replacing

if TYPE_CHECKING:
    from geartrain import Run

#: Hooks that the trace shows as spans, besides torch's own.
_SPANS = (
    *("forward", "backward", "reduce_gradients", "clip_gradients", "optimizer_step"),
    *("log_metrics", "save_checkpoint"),
)
#: Flow events of one rank have 32-bit ids.
_IDS_OF_A_RANK = 2**32


class Recorder:
    """Records a few steps of this rank and writes them to a file.

    Args:
        warmup: steps that the profiler runs without recording.
        active: steps that it records.
    """

    def __init__(self, run: Run, path: Path, warmup: int, active: int) -> None:
        self._run, self._path, self._left = run, path, warmup + active
        # The hooks are frozen: the loop reads these attributes at each call.
        self._hooks = {name: getattr(run.hooks, name) for name in _SPANS}
        steps = schedule(wait=0, warmup=warmup, active=active, repeat=1)
        self._profiler = profile(schedule=steps, on_trace_ready=self._write)
        self._profiler.start()
        for name, hook in self._hooks.items():
            setattr(run.hooks, name, _span(hook, f"geartrain {name}"))

    def step(self) -> bool:
        """Act after a step; False after the last one."""
        self._left -= 1
        if self._left:
            self._profiler.step()
        else:
            self.stop()
        return self._left > 0

    def stop(self) -> None:
        """End the recording; write the steps that it has."""
        for name, hook in self._hooks.items():
            setattr(self._run.hooks, name, hook)
        self._profiler.stop()

    def _write(self, profiler: profile) -> None:
        beside = self._path.with_name(f".{self._path.name}")
        try:
            profiler.export_chrome_trace(str(beside))  # it compresses a file named .gz
            beside.replace(self._path)
        finally:
            beside.unlink(missing_ok=True)


def _span(hook: Callable[..., Any], name: str) -> Callable[..., Any]:
    def call(**arguments: Any) -> Any:
        with record_function(name):
            return hook(**arguments)

    return call


def merge(files: Mapping[int, Path], path: Path) -> None:
    """Merge the traces of ranks into one, and remove them.

    Processes and GPUs of each rank get new ids and names. Times are those of the ranks' system
    clocks, moved to the base of the first file.

    Raises:
        OSError, ValueError: a trace cannot be read.
        TrainingError: the merged trace cannot be written.
    """
    events: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    pids: dict[tuple[int, Any], int] = {}
    for rank, file in files.items():
        with gzip.open(file, "rt", encoding="utf-8") as text:
            trace = json.load(text)
        facts = facts or {name: value for name, value in trace.items() if name != "traceEvents"}
        base = (trace.get("baseTimeNanoseconds", 0) - facts.get("baseTimeNanoseconds", 0)) / 1000
        events += _events_of(rank, trace["traceEvents"], base, pids)
    facts["distributedInfo"] = {"ranks": list(files)}
    with replacing(path) as target, gzip.open(target, "wb") as compressed:
        compressed.write(json.dumps({**facts, "traceEvents": events}).encode())
    for file in files.values():
        file.unlink()


def _events_of(
    rank: int, events: list[dict[str, Any]], base: float, pids: dict[tuple[int, Any], int]
) -> list[dict[str, Any]]:
    """Return a rank's events with ids that no other rank has; each has ph, ts, pid and tid."""
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    tids: dict[tuple[int, Any], int] = {}
    found: list[dict[str, Any]] = []
    for event in events:
        process, thread = event.get("pid", 0), event.get("tid", 0)
        if (rank, process) not in pids:
            pids[rank, process] = pid = len(pids) + 1
            message = names.get(process, process)
            name = {"name": f"rank {rank}: {message}"}
            head = {"ph": "M", "ts": 0, "pid": pid, "tid": 0}
            found.append({**head, "name": "process_name", "args": name})
            found.append({**head, "name": "process_sort_index", "args": {"sort_index": pid}})
        if event.get("name") in ("process_name", "process_sort_index"):
            continue
        pid = pids[rank, process]
        if not isinstance(thread, int):
            tid = tids.setdefault((pid, thread), 2**31 + len(tids))
        else:
            tid = thread
        event = {**event, "ts": event.get("ts", 0) + base, "pid": pid, "tid": tid}
        if isinstance(event.get("id"), int):
            event["id"] += rank * _IDS_OF_A_RANK
        found.append(event)
    return found
