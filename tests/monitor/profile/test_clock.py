"""The clock: own time of nested timers, wrappers, and times that are set back."""

import pytest

from geartrain_monitor.profile import clock as module
from geartrain_monitor.profile.clock import Clock


@pytest.fixture
def time(monkeypatch):
    """A clock's time in seconds, which the test moves."""
    time = [0.0]
    monkeypatch.setattr(module, "perf_counter", lambda: time[0])
    return time


def seconds(clock):
    reading = clock.read()
    return {slot: taken for slot, taken in zip(clock.slots, reading.seconds, strict=True) if taken}


def test_second_counts_only_in_the_innermost_timer(time):
    clock = Clock()

    def work(taken, then=lambda: None):
        time[0] += taken
        then()

    inner = clock.timer(lambda: work(2.0), "b", "forward")
    outer = clock.timer(lambda: work(1.0, inner), "a", "step")
    clock.start()
    outer()
    outer()
    assert seconds(clock) == {("a", "step"): 2.0, ("b", "forward"): 4.0}
    assert clock.read().calls == [0, 2, 2]
    assert clock.read().wall == 6.0


def test_error_in_an_inner_timer_keeps_the_outer_s_time(time):
    clock = Clock()

    def fail():
        time[0] += 2.0
        raise KeyError

    inner = clock.timer(fail, "b", "forward")

    def work():
        with pytest.raises(KeyError):
            inner()
        time[0] += 1.0

    outer = clock.timer(work, "a", "step")
    clock.start()
    outer()
    assert seconds(clock) == {("a", "step"): 1.0, ("b", "forward"): 2.0}


def test_wrapper_counts_its_own_time_and_one_call(time):
    clock = Clock()

    def wrapper():
        time[0] += 1.0
        result = yield
        time[0] += 2.0
        return result

    timed = clock.wrapper_timer(wrapper, "a", "forward")
    clock.start()
    generator = timed()
    next(generator)
    time[0] += 10.0
    with pytest.raises(StopIteration) as end:
        generator.send("result")
    assert end.value.value == "result"
    assert seconds(clock) == {("a", "forward"): 3.0}
    assert clock.read().calls == [0, 1]


def test_set_back_forgets_time_and_returns_it(time):
    clock = Clock()

    def work():
        time[0] += 1.0

    timed = clock.timer(work, "a", "forward")
    clock.start()
    timed()
    reading = clock.read()
    timed()
    time[0] += 5.0
    assert clock.set_back(reading).wall == 6.0
    timed()
    assert clock.read().wall == 2.0
    assert seconds(clock) == {("a", "forward"): 2.0}
