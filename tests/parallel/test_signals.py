"""Signals that end a rank are ignored while it already ends."""

import os
import signal

import pytest

from geartrain.launch.signals import Interrupted
from geartrain_parallel.reports import ERROR_FILE, begin, report
from geartrain_parallel.signals import raise_on_signals
from geartrain_parallel.workers import _handled_by_program


@pytest.fixture(autouse=True)
def _no_run_has_failed():
    begin()


def ended_by(number):
    os.kill(os.getpid(), number)


LOST = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"


def test_a_rank_that_has_just_lost_its_peers_is_not_interrupted(tmp_path, monkeypatch):
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    lost = RuntimeError(LOST)
    with raise_on_signals():
        try:
            raise lost
        except RuntimeError:
            ended_by(signal.SIGTERM)
            try:  # as the loader, whose worker got the signal, too
                raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Terminated.")
            except RuntimeError:
                ended_by(signal.SIGTERM)
        assert lost.__notes__ == ["and then this rank was asked to end, by SIGTERM"]
        with pytest.raises(Interrupted, match="SIGTERM"):
            ended_by(signal.SIGTERM)


def test_an_interrupted_rank_is_not_interrupted_again_by_its_starter(tmp_path, monkeypatch):
    """As after Ctrl-C, which ranks and starter get at the same time."""
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    with raise_on_signals():
        try:
            ended_by(signal.SIGINT)
        except Interrupted:
            ended_by(signal.SIGTERM)
        with pytest.raises(Interrupted, match="SIGTERM"):
            ended_by(signal.SIGTERM)


def test_the_starter_is_interrupted_after_it_has_lost_its_peers(monkeypatch):
    monkeypatch.delenv(ERROR_FILE, raising=False)
    with raise_on_signals():
        try:
            raise RuntimeError(LOST)
        except RuntimeError:
            with pytest.raises(Interrupted, match="SIGTERM"):
                ended_by(signal.SIGTERM)


def test_a_rank_that_handles_another_error_is_interrupted(tmp_path, monkeypatch):
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    with raise_on_signals():
        try:
            raise KeyError("a missing file")
        except KeyError:
            with pytest.raises(Interrupted, match="SIGTERM"):
                ended_by(signal.SIGTERM)


def test_a_rank_whose_errors_refer_to_each_other_is_interrupted(tmp_path, monkeypatch):
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    first, second = KeyError("first"), KeyError("second")
    with raise_on_signals():
        try:
            raise first
        except KeyError:
            first.__context__, second.__context__ = second, first
            with pytest.raises(Interrupted, match="SIGTERM"):
                ended_by(signal.SIGTERM)


def test_a_rank_that_has_reported_its_error_is_not_interrupted_in_teardown(tmp_path, monkeypatch):
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    begin()
    report(KeyError("mine"))
    with raise_on_signals():
        ended_by(signal.SIGTERM)
        with pytest.raises(Interrupted, match="SIGINT"):
            ended_by(signal.SIGINT)
    begin()


def test_a_rank_whose_earlier_run_has_failed_can_be_interrupted_in_the_next(tmp_path, monkeypatch):
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    report(KeyError("survived"))
    begin()
    with raise_on_signals(), pytest.raises(Interrupted, match="SIGTERM"):
        ended_by(signal.SIGTERM)


def test_a_signal_that_the_program_handles_does_not_end_its_ranks():
    assert _handled_by_program() == set()
    with raise_on_signals():
        assert _handled_by_program() == set()
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        assert _handled_by_program() == {signal.SIGTERM}
    finally:
        signal.signal(signal.SIGTERM, before)
