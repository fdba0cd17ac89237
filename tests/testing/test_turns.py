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


# --- Ctrl-C ---------------------------------------------------------------------------------------


def interrupt():
    """Send SIGINT to the main thread, as Ctrl-C does: that is rank 0, which waits for its turn."""
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


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
