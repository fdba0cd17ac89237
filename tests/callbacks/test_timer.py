"""Timer and Trainer(max_time=...): training ends after a time limit."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
from small_models import EvalNet, Net, fit, loader, trainer

from geartrain import hookimpl
from geartrain.callbacks import Timer


@pytest.fixture
def clock(monkeypatch):
    """Set the timer's clock: a training step takes one second."""
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr("geartrain_callbacks.timer.time", clock)
    return clock


@pytest.fixture
def ticks(clock):
    class Ticks:
        @hookimpl(wrapper=True)
        def step(self):
            yield
            clock.now += 1

    return Ticks()


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("01:02:03:04", 93784),
        ("00:00:00:30", 30),
        ("90", 90),
        (12.5, 12.5),
        (7, 7),
        (timedelta(minutes=2), 120),
        ({"hours": 1, "minutes": 1}, 3660),
    ],
)
def test_forms_of_a_duration(given, seconds):
    assert Timer(given).seconds == seconds
    assert trainer(max_time=given).plan.plugins[0].name == "timer"


@pytest.mark.parametrize(("flush", "steps"), [(1, 8), (5, 10), (50, 12)])
def test_it_ends_training_at_the_next_flush(ticks, flush, steps, capsys):
    one = fit(plugins=[ticks], max_time=8, max_epochs=9, log_every_n_steps=flush)
    assert one.global_step == steps
    assert any(part.reason == "max_time=8" for part in one.plan.plugins)
    message = f"0:00:08 are over. Training ends in epoch 2, after {steps} steps"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("limit", "epochs"), [(6, 1), (7, 2), (12, 2)])
def test_by_epochs(ticks, limit, epochs):
    ended = fit(plugins=[ticks, Timer(limit, interval="epoch")], max_epochs=9, log_every_n_steps=1)
    assert (ended.current_epoch, ended.global_step) == (epochs, 6 * epochs)


def test_time_in_time(ticks, capsys):
    timer = Timer({"hours": 1})
    assert fit(plugins=[ticks, timer], max_epochs=2).global_step == 12
    assert (timer.time_elapsed(), timer.time_remaining()) == (12, 3588)
    assert capsys.readouterr().err == ""


def test_a_fit_that_resumes_keeps_the_time(ticks, tmp_path):
    fit(plugins=[ticks, Timer(9)], output=tmp_path)
    options = {"max_epochs": 9, "log_every_n_steps": 1, "output": tmp_path}
    again = trainer(plugins=[ticks, Timer(9)], **options)
    again.fit(Net(), loader(), ckpt_path="last")
    assert again.global_step == 6 + 3


def test_each_fit_has_the_whole_time(ticks):
    one = trainer(plugins=[ticks], max_time=8, max_epochs=9, log_every_n_steps=1)
    for _ in range(3):
        one.fit(EvalNet(), loader())
        assert one.global_step == 8


def test_evaluation_has_no_limit(clock, ticks):
    timer = Timer(1e-9)
    assert trainer(plugins=[timer]).validate(EvalNet(), loader())[0]
    assert timer.time_elapsed() == 0
