"""Ranks meet in a new store for each run."""

from datetime import timedelta

import pytest

from geartrain import TrainingError
from geartrain.parallel import ClusterEnvironment
from geartrain_parallel import rendezvous, sockets


@pytest.fixture
def agent(monkeypatch):
    """The store of torchrun's agent, which outlives restarts of a program."""
    store = rendezvous.serve(sockets.bind("127.0.0.1", None), timedelta(seconds=30))
    for name, value in {
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }.items():
        monkeypatch.setenv(name, value)
    return store


def test_after_a_restart_by_torchrun_ranks_do_not_find_the_old_store(agent, monkeypatch):
    def begin(attempt, rank, seconds):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        monkeypatch.setattr(rendezvous, "_program", {})  # as in another process
        place = ClusterEnvironment("torchrun", rank, 2, rank, 2, 0, agent.host, agent.port)
        return rendezvous.run_store(place, "launched/1", timedelta(seconds=seconds))

    first = begin("0", 0, 30)
    assert begin("0", 1, 30).port == first.port
    with pytest.raises(TrainingError, match="rank 1 waited 1 s for rank 0 to begin this run"):
        begin("1", 1, 1)
