"""Spawned ranks: one timeline, and a plugin that was given as an object."""

import gzip
import json

import pytest

from geartrain_monitor.profile import Profile

from ...spawn.models import Net, loader, trainer


@pytest.mark.end_to_end  # test_trace.py merges without processes
def test_trace_of_spawned_ranks_is_one_timeline(tmp_path, capfd):
    profile = Profile(wait=1, warmup=0, active=1)
    trainer(plugins=[profile], output=str(tmp_path)).fit(Net(), loader())
    found = json.loads((tmp_path / "profile.json").read_text())
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert "rank 0 of 2" in capfd.readouterr().out
    with gzip.open(tmp_path / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    begins = {
        names[e["pid"]].partition(":")[0]: e["ts"]
        for e in events
        if e["name"] == "geartrain forward"
    }
    assert begins.keys() == {"rank 0", "rank 1"}
    # The ranks wait for each other in every step, so both record it within seconds.
    assert abs(begins["rank 0"] - begins["rank 1"]) < 60e6
    assert not list(tmp_path.glob("*rank-*"))
