"""Check that no test leaves a sampling thread behind."""

import pytest

from .cases import sampling


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    assert not sampling()
