"""Messages of timeouts; tests/ddp/test_launchers.py and test_workers.py have the reports."""

import pytest

from geartrain_parallel.failures import is_timeout


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
