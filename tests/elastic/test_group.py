"""The connections between processes; here between threads."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from geartrain_elastic.group import Group

from .threads import in_threads


def in_groups(ranks, function):
    """Return the results of ``function(group)`` of each process of a group, in threads."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    done = threading.Barrier(len(ranks))  # a group's sockets are found among the process's

    def work(index):
        prefixed = dist.PrefixStore("group", dist.TCPStore("127.0.0.1", store.port, None, False))
        group = Group(prefixed, index, ranks, timedelta(seconds=30))
        try:
            return function(group)
        finally:
            done.wait(60)
            group.close()

    return in_threads(work, len(ranks))


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.mark.parametrize(
    "ranks",
    [[[0, 1], [2, 3, 4]], [[0, 3], [1, 2, 4]], [[0], [1], [2, 3], [4]], [[0, 4], [1, 3], [2]]],
)
def test_sums_are_those_of_one_process(ranks):
    def summed(group):
        leaves = [
            torch.randn(1001, generator=torch.Generator().manual_seed(rank))
            for rank in ranks[group.index]
        ]
        return group.sum(leaves).tolist()

    generators = [torch.Generator().manual_seed(rank) for rank in range(5)]
    alone = Group(None, 0, [range(5)], timedelta(seconds=1))
    expected = alone.sum([torch.randn(1001, generator=each) for each in generators]).tolist()
    assert in_groups(ranks, summed) == [expected] * len(ranks)


def test_data_of_any_length_is_gathered():
    lengths = [0, 8184 - 32, 8185 - 32, 100_000]
    found = in_groups([[0], [1], [2], [3]], lambda g: g.gather(b"x" * lengths[g.index]))
    assert [[len(each) for each in row] for row in found] == [lengths] * 4
