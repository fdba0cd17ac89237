"""Signals that end a rank: not heard while it is ending already."""

import os
import signal

import pytest

from geartrain.plugin_api import Interrupted
from geartrain_parallel.reports import ERROR_FILE, begin, report
from geartrain_parallel.signals import raise_on_signals


@pytest.fixture(autouse=True)
def _no_run_has_failed():
    begin()


def ended_by(number):
    os.kill(os.getpid(), number)


LOST = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"


def test_a_rank_that_has_just_lost_its_peers_is_not_interrupted_on_its_way_out(
    tmp_path, monkeypatch
):
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    lost = RuntimeError(LOST)
    with raise_on_signals():
        try:
            raise lost
        except RuntimeError:
            ended_by(signal.SIGTERM)
        assert lost.__notes__ == ["and then this rank was asked to end, by SIGTERM"]
        with pytest.raises(Interrupted, match="SIGTERM"):
            ended_by(signal.SIGTERM)


def test_a_rank_that_is_interrupted_already_is_not_interrupted_again_by_its_starter(
    tmp_path, monkeypatch
):
    """As after Ctrl-C, which ranks and starter hear at once."""
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    with raise_on_signals():
        try:
            ended_by(signal.SIGINT)
        except Interrupted:
            ended_by(signal.SIGTERM)
        with pytest.raises(Interrupted, match="SIGTERM"):
            ended_by(signal.SIGTERM)


def test_the_starter_loses_its_peers_because_it_is_asked_to_end_and_says_so(monkeypatch):
    monkeypatch.delenv(ERROR_FILE, raising=False)
    with raise_on_signals():
        try:
            raise RuntimeError(LOST)
        except RuntimeError:
            with pytest.raises(Interrupted, match="SIGTERM"):
                ended_by(signal.SIGTERM)


def test_another_error_that_is_being_handled_is_no_reason_to_stay(tmp_path, monkeypatch):
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    with raise_on_signals():
        try:
            raise KeyError("a file that is not there")
        except KeyError:
            with pytest.raises(Interrupted, match="SIGTERM"):
                ended_by(signal.SIGTERM)


def test_a_rank_that_has_told_its_error_is_not_interrupted_while_it_tears_down(
    tmp_path, monkeypatch
):
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    begin()
    report(KeyError("mine"))
    with raise_on_signals():
        ended_by(signal.SIGTERM)
        with pytest.raises(Interrupted, match="SIGINT"):
            ended_by(signal.SIGINT)
    begin()


def test_a_rank_whose_earlier_run_has_failed_is_interrupted_in_the_next(tmp_path, monkeypatch):
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    report(KeyError("survived"))
    begin()
    with raise_on_signals(), pytest.raises(Interrupted, match="SIGTERM"):
        ended_by(signal.SIGTERM)
