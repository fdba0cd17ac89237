"""The starter replaces processes that die or hang; if they do so again and again, the run ends."""

import os
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

import geartrain as gt
from geartrain_elastic import ElasticStrategy, starter
from geartrain_elastic.member import Joined, Waits
from geartrain_elastic.starter import _Members, _Process

THIRD = "the process of rank 1 was ended by SIGKILL, for the third time in the same place"


class Members(_Members):
    """Its processes are not real."""

    def _start(self, ranks, is_new=True, later=None):
        number, (link, remote_end) = next(self._started), Pipe()
        killed = SimpleNamespace(
            exitcode=-9,
            pid=os.getpid(),
            sentinel=None,
            is_alive=lambda: True,
            kill=lambda: None,
            join=lambda: None,
            say=remote_end.send,
        )
        self._processes[number] = _Process(number, killed, link, ranks, has_state=not is_new)
        return self._processes[number]

    def of(self, rank):
        return next(p for p in self._processes.values() if rank in p.ranks)

    def hear(self, rank, message):
        process = self.of(rank)
        process.process.say(message)
        self._read(process)

    def die(self, joins, rank=1):
        """Let the process of a rank die; the others go on from the collective ``joins``."""
        self._replace([self.of(rank)])
        if joins is not None:
            self.hear(rank, Joined(self._generation, joins))


@pytest.fixture
def members():
    found = Members(None, ElasticStrategy(timeout=100.0), None, None, None)
    for rank in range(3):
        found._start([rank], is_new=False)
    found._publish()
    found.hear(0, Joined(0, 0))
    return found


def test_the_third_death_in_the_same_place_ends_the_run(members):
    members.die(7)
    members.die(7)
    with pytest.raises(gt.TrainingError, match=THIRD):
        members.die(7)


def test_the_third_death_without_the_state_ends_the_run(members):
    members.die(None)
    members.die(None)
    with pytest.raises(gt.TrainingError, match=THIRD):
        members.die(None)


def test_unrelated_deaths_do_not_end_the_run(members):
    for place in (7, 7, 8, 8, 9, None, 10):
        members.die(place)
    for rank in (0, 1, 2, 0, 2):  # all in one long step
        members.die(11, rank)


class Clock:
    """The starter's clock, which a test moves."""

    def __init__(self, members):
        self.members, self.now = members, members._looked

    def monotonic(self):
        return self.now

    def passes(self, seconds, waiting, place=(0, 5)):
        """Let time pass, in which some ranks wait; return the ranks of processes that hang."""
        late = []
        for _ in range(seconds):
            self.now += 1.0
            for rank in waiting:
                self.members.hear(rank, Waits(place))
            late += self.members._hung(list(self.members._processes.values()))
        return [process.ranks for process in late]


@pytest.fixture
def clock(members, monkeypatch):
    found = Clock(members)
    monkeypatch.setattr(starter, "time", found)
    return found


def test_a_rank_that_hangs_is_replaced_and_its_successor_has_as_much_time(members, clock):
    assert clock.passes(99, [0, 2]) == []
    assert clock.passes(2, [0, 2])[0] == [1]
    members.die(None)
    assert clock.passes(99, [0, 2], (1, -1)) == []  # the others wait until it connects
    assert clock.passes(99, [0, 2], (1, 5)) == []  # and until it has set up
    assert clock.passes(200, [1, 2], (1, 6))[0] == [0]


def test_a_late_word_of_the_time_before_does_not_end_the_successor(members, clock):
    assert clock.passes(101, [0, 2])[0] == [1]
    members.die(None)
    assert clock.passes(1, [0, 2]) == []


def test_ranks_that_wait_often_do_not_wait_for_long(members, clock):
    for done in range(200):
        assert clock.passes(2, [0, 2], (0, done)) == []


def test_a_suspended_job_goes_on(members, clock):
    clock.passes(50, [0, 2])
    clock.now += 3600.0
    assert clock.passes(1, [0, 2]) == []
    assert clock.passes(60, [0, 2])[0] == [1]


def test_a_process_that_ends_when_the_others_have_waited_too_long_is_replaced_once(
    members, clock, monkeypatch, capfd
):
    monkeypatch.setattr(starter, "connection", SimpleNamespace(wait=lambda *_: []))
    assert clock.passes(100, [0, 2]) == []
    members.of(1).process.is_alive = lambda: False
    clock.now += 1.0
    for rank in (0, 2):
        members.hear(rank, Waits((0, 5)))
    members._look()
    assert [process.ranks for process in members._processes.values()] == [[0], [2], [1]]
    assert "the process of rank 1 was ended by SIGKILL; another" in capfd.readouterr().err
