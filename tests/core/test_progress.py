"""The progress bar on a terminal, plain lines elsewhere, and the closing table."""

import re
import sys
from types import SimpleNamespace

import pytest
from rich.progress import Progress

import geartrain as gt
from geartrain import hookimpl

from .models import EvalNet, Logging, Net, Pretend, fit, loader, trainer

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"  # the cursor, while a bar is drawn and afterwards


@pytest.fixture
def terminal(monkeypatch):
    """rich takes standard output and error for a terminal."""
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "150"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def plain(monkeypatch):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "150")


@pytest.fixture
def clock(monkeypatch):
    """The bar's clock: ``clock.now`` seconds."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr("geartrain.builtin.progress.time", clock)
    return clock


def text(drawn):
    """Without colours and cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn)


def logs(self, batch, batch_idx):
    self.log("loss", 0.25 * (batch_idx + 1), prog_bar=True)
    self.log("hidden", 7.0)


def test_a_bar_on_a_terminal(terminal, clock, capsys):
    streams = sys.stdout, sys.stderr
    fit(Logging(logs), max_epochs=2, enable_progress_bar=True, log_every_n_steps=1)
    drawn = capsys.readouterr().err
    assert "epoch 1/2" in text(drawn)
    assert "epoch 2/2" in text(drawn)
    assert "6/6" in text(drawn)
    assert "loss=1.5" in text(drawn)
    assert "hidden" not in text(drawn)
    assert drawn.rindex(SHOW) > drawn.rindex(HIDE)
    assert (sys.stdout, sys.stderr) == streams


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_the_bar_is_stopped_on_an_error(terminal, capsys, error):
    class Fails(Net):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                raise error
            return super().training_step(batch, batch_idx)

    streams = sys.stdout, sys.stderr
    with pytest.raises(error):
        fit(Fails(), enable_progress_bar=True)
    drawn = capsys.readouterr()
    assert drawn.err.rindex(SHOW) > drawn.err.rindex(HIDE)
    assert (sys.stdout, sys.stderr) == streams
    assert "steps" not in drawn.out  # no closing table of a run that failed


def test_the_bar_says_what_runs_now(terminal, capsys):
    fit(EvalNet(), val=loader(), enable_progress_bar=True, num_sanity_val_steps=1)
    drawn = text(capsys.readouterr().err)
    assert "sanity check" in drawn
    assert "epoch 1/1, validate" in drawn


def test_a_bar_of_a_run_without_end_or_length(terminal, capsys):
    fit(train=iter(list(loader())), enable_progress_bar=True, max_epochs=-1, max_steps=6)
    drawn = text(capsys.readouterr().err)
    assert "epoch 1" in drawn
    assert "epoch 1/" not in drawn


@pytest.mark.parametrize(("seconds", "least", "most"), [(0.0, 1, 4), (0.001, 2, 6), (10.0, 200, 210)])
def test_redraws_are_limited(terminal, clock, monkeypatch, seconds, least, most):
    """200 steps of so many seconds: one redraw in 0.1 s at most, but for an epoch's start and end."""

    class Tick:
        @hookimpl
        def on_step_end(self):
            clock.now += seconds

    draws = []
    monkeypatch.setattr(Progress, "refresh", lambda self: draws.append(clock.now))
    fit(train=list(loader()) * 40, limit_train_batches=200, plugins=[Tick()], enable_progress_bar=True)
    assert least <= len(draws) <= most


def test_plain_lines_without_a_terminal(plain, capsys):
    fit(Logging(logs, lambda self, batch, batch_idx: self.log("acc", 0.5)), val=loader(), max_epochs=2, enable_progress_bar=True)
    printed = capsys.readouterr().err
    assert "\x1b" not in printed
    first, second = printed.splitlines()
    assert first.startswith("epoch 1/2: step 6, ")
    assert second.startswith("epoch 2/2: step 12, ")
    for line in (first, second):
        assert "steps/s" in line
        assert "loss=1.5" in line
        assert "acc=0.5" in line


@pytest.mark.parametrize("where", ["terminal", "plain"])
def test_the_closing_table_lists_every_metric(where, request, capsys):
    request.getfixturevalue(where)
    fit(Logging(logs), max_epochs=2, enable_progress_bar=True)
    printed = text(capsys.readouterr().out)
    assert "fit: 12 steps, 2 epochs" in printed
    for name, value in {"loss": "1.5", "hidden": "7"}.items():
        assert re.search(rf"{name}\W+{value}\W", printed)


@pytest.mark.parametrize(("command", "metric"), [("validate", "val_loss"), ("test", "test_loss"), ("predict", None)])
def test_the_table_of_an_evaluation(plain, command, metric, capsys):
    getattr(trainer(enable_progress_bar=True), command)(EvalNet(), loader())
    printed = capsys.readouterr()
    assert metric in printed.out if metric else printed.out == ""
    assert printed.err == ""


def test_other_ranks_print_nothing(terminal, capsys):
    strategy = type("Second", (Pretend,), {"world": gt.World(rank=1, size=2, local_rank=1, local_size=2)})
    fit(Logging(logs), strategy=strategy(), devices=2, enable_progress_bar=True)
    assert capsys.readouterr() == ("", "")


def test_without_the_bar_nothing_is_printed(terminal, capsys):
    fit(EvalNet(), val=loader(), enable_progress_bar=False)
    assert capsys.readouterr() == ("", "")
