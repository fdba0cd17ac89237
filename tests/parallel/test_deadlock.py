"""Ranks that wait for each other in different collectives; tests/sharded/test_apart.py has runs."""

from geartrain_parallel.deadlock import Wait, deadlocked

WORLD = [0, 1, 2]


def wait(group, number, call="all_reduce [[8]]", members=WORLD, **begun):
    return Wait(group, members, number, call, "", {**begun, group: number})


def test_ranks_in_one_collective_only_wait():
    assert deadlocked({rank: wait("a", 3) for rank in WORLD}) == []


def test_ranks_in_different_collectives_of_one_number_cannot_continue():
    waits = {0: wait("a", 3), 1: wait("a", 3, "all_gather [[8]]"), 2: wait("a", 3)}
    assert deadlocked(waits) == [0, 1, 2]


def test_ranks_wait_for_each_other_in_two_groups():
    assert deadlocked({0: wait("a", 3, b=1), 1: wait("b", 2, a=2)}) == [0, 1]


def test_a_rank_that_computes_may_come():
    assert deadlocked({0: wait("a", 3), 2: wait("a", 3)}) == []
    assert deadlocked({0: wait("a", 3, b=1)}) == []


def test_a_rank_that_has_left_the_collective_is_not_awaited():
    # A broadcast ends early on its source.
    assert deadlocked({0: wait("a", 3, b=7), 1: wait("b", 7, a=3)}) == []


def test_three_ranks_wait_in_a_circle():
    waits = {
        0: wait("a", 1, members=[0, 1], c=0),
        1: wait("b", 1, members=[1, 2], a=0),
        2: wait("c", 1, members=[2, 0], b=0),
    }
    assert deadlocked(waits) == [0, 1, 2]
    del waits[2]
    assert deadlocked(waits) == []
