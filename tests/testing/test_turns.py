"""Threads that take turns: their order, state of each rank, errors and Ctrl-C."""

import random
import signal
import threading
import time
from functools import partial

import pytest
import torch

import geartrain_testing.turns
from geartrain import TrainingError
from geartrain_testing.turns import Turns


@pytest.fixture(autouse=True)
def _no_thread_survives():
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def run(*functions, first=0):
    """Run ``function(turns, rank)`` on each rank."""
    turns = Turns(len(functions), first)
    turns.run([partial(function, turns, rank) for rank, function in enumerate(functions)])
    return turns


def refused(*functions):
    with pytest.raises(TrainingError) as caught:
        run(*functions)
    return caught.value


# --- turns ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1, 2])
def test_each_rank_runs_until_it_meets_the_others_in_the_order_of_ranks(first):
    order = []

    def work(turns, rank):
        for part in range(3):
            order.append((part, rank))
            assert turns.exchange(rank, "here", 10 * part + rank) == [
                10 * part + other for other in range(3)
            ]
        return -rank

    assert run(work, work, work, first=first).results == [0, -1, -2]
    assert order == [(part, (first + i) % 3) for part in range(3) for i in range(3)]


def test_one_rank_meets_itself():
    assert run(lambda turns, rank: turns.exchange(rank, "here", 5)).results == [[5]]


def test_each_rank_has_its_own_random_generators():
    """Ranks start with the same state. Draws and seeds of one do not change another."""
    numpy = pytest.importorskip("numpy")

    def draw():
        return torch.rand(1).item(), random.random(), float(numpy.random.rand())

    def work(turns, rank):
        if rank == 1:
            torch.manual_seed(1)
            random.seed(1)
            numpy.random.seed(1)
        first = draw()
        turns.exchange(rank, "here", None)
        return [first, draw()]

    torch.manual_seed(5), random.seed(5), numpy.random.seed(5)
    of_5 = [draw() for _ in range(3)]
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    of_1 = [draw() for _ in range(2)]
    torch.manual_seed(5), random.seed(5), numpy.random.seed(5)
    assert run(work, work, work).results == [of_5[:2], of_1, of_5[:2]]
    assert draw() == of_5[2], "the caller continues where rank 0 stopped"


def test_each_rank_has_its_own_default_type_and_determinism(monkeypatch):
    # The inner function does not import the compiler, which takes seconds.
    monkeypatch.setattr(
        torch, "use_deterministic_algorithms", torch._C._set_deterministic_algorithms
    )

    def work(turns, rank):
        if rank:
            torch.set_default_dtype(torch.float64)
            torch.use_deterministic_algorithms(True, warn_only=True)
        turns.exchange(rank, "here", None)
        return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()

    assert run(work, work).results == [(torch.float32, False), (torch.float64, True)]
    assert torch.get_default_dtype() is torch.float32
    assert not torch.are_deterministic_algorithms_enabled()


# --- ranks that do not meet -----------------------------------------------------------------------


def test_different_collectives_are_an_error_that_names_both_ranks_and_both_places():
    error = refused(
        lambda turns, rank: turns.exchange(rank, "all_gather", 1),
        lambda turns, rank: turns.exchange(rank, "barrier", None),
    )
    code = test_different_collectives_are_an_error_that_names_both_ranks_and_both_places.__code__
    one, other = (f"{__file__}:{code.co_firstlineno + line}" for line in (2, 3))
    assert f"rank 0 is in all_gather ({one}), and rank 1 in barrier ({other})" in str(error)
    assert "Fix: call the same collectives in the same order" in str(error)
    assert error.__notes__ == ["rank 1 of 2 raised this"]


@pytest.mark.parametrize("early", [0, 1, 2])
def test_a_rank_that_ends_without_a_collective_is_named_by_the_others(early):
    def work(turns, rank):
        turns.exchange(rank, "barrier", None)
        if rank != early:
            turns.exchange(rank, "all_gather", None)

    error = refused(work, work, work)
    waits = 1 if early == 0 else 0
    assert f"rank {waits} is in all_gather (" in str(error)
    assert f"and rank {early} has ended without it" in str(error)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("kind", [KeyError, SystemExit, KeyboardInterrupt, pytest.skip.Exception])
def test_the_first_error_is_raised_and_ends_the_others(rank, kind):
    informed = []

    def work(turns, mine):
        if mine == rank:
            turns.exchange(mine, "barrier", None)
            raise kind("my own error")
        with pytest.raises(
            TrainingError, match=f"rank {rank} has failed, so rank {mine} ends: {kind.__name__}: "
        ) as caught:
            [turns.exchange(mine, what, None) for what in ("barrier", "all_gather")]
        assert isinstance(caught.value.__cause__, kind)
        informed.append(mine)
        turns.exchange(mine, f"barrier in the teardown of rank {mine}", None)

    turns = Turns(3)
    with pytest.raises(kind, match="my own error") as caught:
        turns.run([partial(work, turns, mine) for mine in range(3)])
    assert caught.value.__notes__ == [f"rank {rank} of 3 raised this"]
    assert sorted(informed) == [other for other in range(3) if other != rank]
    assert turns.errors[rank] is caught.value
    assert all(isinstance(turns.errors[other], TrainingError) for other in informed)


def test_a_rank_does_not_start_after_another_has_failed():
    started = []

    def fails(turns, rank):
        raise KeyError("first")

    turns = Turns(2)
    with pytest.raises(KeyError, match="first"):
        turns.run([partial(fails, turns, 0), lambda: started.append(1)])
    assert not started
    assert "rank 0 failed before rank 1 started" in str(turns.errors[1])


# --- Ctrl-C ---------------------------------------------------------------------------------------


def interrupt():
    """Send SIGINT to the main thread, as Ctrl-C does: that is rank 0, which waits for its turn."""
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def test_an_interrupt_ends_a_rank_at_its_next_collective():
    ended = []

    def work(turns, rank):
        turns.exchange(rank, "barrier", None)
        if rank == 1:
            interrupt()
        try:
            turns.exchange(rank, "barrier", None)
        finally:
            ended.append(rank)

    with pytest.raises(KeyboardInterrupt):
        run(work, work)
    assert sorted(ended) == [0, 1]


def test_an_interrupt_ends_a_rank_that_reaches_no_collective(monkeypatch):
    monkeypatch.setattr(geartrain_testing.turns, "PATIENCE", 0.1)
    began, torn_down = time.monotonic(), []

    def work(turns, rank):
        turns.exchange(rank, "barrier", None)
        if rank == 0:
            return
        interrupt()
        try:
            while time.monotonic() < began + 20:
                pass
        finally:
            torn_down.append(rank)

    turns = Turns(2)
    with pytest.raises(KeyboardInterrupt):
        turns.run([partial(work, turns, rank) for rank in range(2)])
    assert torn_down == [1]
    assert time.monotonic() < began + 10
    assert isinstance(turns.errors[1], KeyboardInterrupt)
