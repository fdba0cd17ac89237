"""The merged trace: ids and clocks of two ranks."""

import gzip
import json

from geartrain_monitor.profile.trace import merge


def span(pid, tid, ts, **more):
    return {"ph": "X", "name": "work", "pid": pid, "tid": tid, "ts": ts, "dur": 1, **more}


def write(path, base, *events):
    with gzip.open(path, "wt") as file:
        json.dump({"baseTimeNanoseconds": base, "traceEvents": events}, file)
    return path


def test_ranks_have_own_processes_names_flows_and_one_clock(tmp_path):
    name = {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "args": {"name": "python"}}
    flow = {"ph": "s", "name": "ac2g", "cat": "ac2g", "pid": 0, "tid": 7, "ts": 3.0, "id": 5}
    files = {
        rank: write(
            tmp_path / f"{rank}", base, name, span(7, 7, 1.0), span("Spans", "Profiler", 2.0), flow
        )
        for rank, base in enumerate((1000, 1_001_000))
    }
    merge(files, tmp_path / "trace.json.gz")
    with gzip.open(tmp_path / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    assert all({"ph", "ts", "pid", "tid"} <= event.keys() for event in events)
    assert all(isinstance(event[key], int) for event in events for key in ("pid", "tid"))
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == [
        f"rank {rank}: {what}" for rank in (0, 1) for what in ("0", "Spans", "python")
    ]
    times = {names[e["pid"]]: e["ts"] for e in events if e["ph"] == "X"}
    assert times["rank 0: python"] == 1.0
    assert times["rank 1: python"] == 1001.0  # its base is 1 ms later
    assert len({e["id"] for e in events if e["ph"] == "s"}) == 2
    assert not any(file.exists() for file in files.values())
