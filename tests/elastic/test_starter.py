"""The starter ends a run whose new processes die again and again."""

from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

import geartrain as gt
from geartrain_elastic import ElasticStrategy
from geartrain_elastic.member import Joined
from geartrain_elastic.starter import _Members, _Process


class Members(_Members):
    """Its new processes have died."""

    def _start(self, ranks, is_new=True, later=None):
        number, (link, self.remote_end) = next(self._started), Pipe()
        killed = SimpleNamespace(exitcode=-9)
        self._processes[number] = _Process(number, killed, link, ranks, has_state=not is_new)
        return self._processes[number]


@pytest.fixture
def members():
    found = Members(None, ElasticStrategy(), None, None, None)
    found._start([0], is_new=False)
    found.last = found._start([1], is_new=False)
    return found


def die(members, joins):
    """Let the process of rank 1 die."""
    members._replace([members.last])
    members.last = members._processes[max(members._processes)]
    if joins is not None:
        members.remote_end.send(Joined(max(members._deaths), joins))
        members._read(members.last)


def test_the_third_process_that_dies_before_it_has_the_state_ends_the_run(members):
    for _ in range(3):
        die(members, None)
    with pytest.raises(gt.TrainingError, match="rank 1 was ended by SIGKILL, the third one before"):
        die(members, None)


def test_the_third_death_in_the_same_place_ends_the_run(members):
    die(members, 7)
    die(members, 7)
    with pytest.raises(gt.TrainingError, match="SIGKILL, for the third time in the same place"):
        die(members, 7)


def test_deaths_in_other_places_do_not_end_the_run(members):
    for place in (7, 7, 8, None, None, 8, None, None, 9):
        die(members, place)
