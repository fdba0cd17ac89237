"""Which errors mean what; tests/ddp/test_faults.py has the rest, with real ranks."""

import signal

import pytest

from geartrain.process import is_timeout
from geartrain.process.workers import Failure, Workers


@pytest.mark.parametrize(
    ("message", "waited"),
    [
        ("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 12000ms for recv operation to complete", True),
        ("DistStoreError: Timed out after 61 seconds waiting for clients. 1/2 clients joined.", True),
        ("DataLoader timed out after 30 seconds", False),
        ("requests.exceptions.ReadTimeout: the read timed out", False),
        ("KeyError: 'x'\nTimed out waiting 12000ms for recv operation to complete", False),
    ],
)
def test_who_has_waited_for_others(message, waited):
    assert is_timeout(message) is waited


LOST = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711")


@pytest.mark.parametrize(
    ("error", "when", "is_rank_1s"),
    [
        (LOST, 9.0, True),
        (LOST, 11.0, True),
        (KeyError("mine"), 11.0, True),
        (KeyError("mine"), 9.0, False),  # rank 1 crashed because of it
        (KeyboardInterrupt(), 9.0, True),
    ],
)
def test_whose_failure_came_first_where_a_signal_ended_the_other(error, when, is_rank_1s):
    workers = object.__new__(Workers)  # none are started
    crashed = Failure(1, 10.0, signal.SIGSEGV, "exit code -11")
    workers.failures = [crashed]
    assert workers._first(error, when) is (crashed if is_rank_1s else None)
