"""Reports of a rank's failure, in several runs, and messages of timeouts."""

import json
import os
import time

import pytest

from geartrain.launch.cluster import ClusterEnvironment
from geartrain_parallel.failures import is_timeout
from geartrain_parallel.reports import ERROR_FILE, begin, failed_at, is_tearing_down, leave, report


@pytest.fixture(autouse=True)
def error_file(tmp_path, monkeypatch):
    path = tmp_path / "error.json"
    monkeypatch.setenv(ERROR_FILE, str(path))
    begin()
    yield path
    begin()


def reported(path):
    return json.loads(path.read_text())["message"]["message"].partition("\n")[0]


def test_the_first_error_of_a_run_stays(error_file):
    began = time.time()
    report(KeyError("first"))
    at = failed_at()
    report(KeyError("second"))
    assert reported(error_file) == "KeyError: 'first'"
    assert began <= at == failed_at()


def test_an_error_is_reported_if_the_folder_of_logs_was_removed(tmp_path, monkeypatch):
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "logs" / "error.json"))
    report(KeyError("first"))
    assert reported(tmp_path / "logs" / "error.json") == "KeyError: 'first'"


def test_the_error_of_a_later_run_replaces_an_earlier_one(error_file):
    report(KeyError("survived"))
    before = failed_at()
    begin()
    assert failed_at() is None
    report(KeyError("of the second run"))
    assert reported(error_file) == "KeyError: 'of the second run'"
    assert failed_at() > before


def test_the_first_error_of_a_rank_that_geartrain_started_stays_for_its_starter(
    error_file, monkeypatch
):
    monkeypatch.setenv(ClusterEnvironment.started_by, str(os.getpid()))
    report(KeyError("survived"))
    begin()
    report(ConnectionError("the other ranks have gone"))
    assert reported(error_file) == "KeyError: 'survived'"


def test_without_an_error_file_the_time_of_the_failure_is_recorded(monkeypatch):
    monkeypatch.delenv(ERROR_FILE)
    begin()
    report(KeyError("mine"))
    assert failed_at() is not None


def test_teardown_ends_when_a_rank_leaves_its_group():
    assert not is_tearing_down()
    report(KeyError("mine"))
    assert is_tearing_down()
    leave()
    assert not is_tearing_down()
    begin()
    report(KeyError("of the second run"))
    assert is_tearing_down()


@pytest.mark.parametrize(
    ("message", "waited"),
    [
        (
            "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 12000ms for recv",
            True,
        ),
        (
            "DistStoreError: Timed out after 61 seconds waiting for clients. 1/2 clients joined.",
            True,
        ),
        ("DataLoader timed out after 30 seconds", False),
        ("requests.exceptions.ReadTimeout: the read timed out", False),
        ("KeyError: 'x'\nTimed out waiting 12000ms for recv operation to complete", False),
    ],
)
def test_a_message_of_a_rank_that_waited_is_recognised(message, waited):
    assert is_timeout(message) is waited
