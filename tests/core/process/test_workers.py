"""Whose failure came first; tests/ddp/test_faults.py has the rest, with real ranks."""

import signal

import pytest

from geartrain.process.workers import Failure, Workers

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
