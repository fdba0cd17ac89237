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


def test_an_agent_that_joins_later_has_another_count_of_restarts(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # a run's store changes them
        monkeypatch.setenv(name, "")
    program, stores = {}, []
    monkeypatch.setattr(rendezvous, "_program", program)
    port = rendezvous.serve_program("127.0.0.1", None, timedelta(seconds=30))
    for rank, restarts in enumerate(("1", "0")):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
        place = ClusterEnvironment("torchrun", rank, 2, 0, 1, rank, "127.0.0.1", port)
        stores.append(rendezvous.run_store(place, "launched/1", timedelta(seconds=5)))
        monkeypatch.setattr(rendezvous, "_program", {})  # the other rank is another process
    assert stores[0].port == stores[1].port
