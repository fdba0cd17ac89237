"""An environment variable changes a supervisor's timeouts."""

import pytest

import geartrain as gt
from geartrain_parallel.patience import Patience


def test_defaults():
    assert (
        Patience.from_environment({})
        == Patience.from_environment({"GEARTRAIN_PATIENCE": ""})
        == Patience(3.0, 5.0, 300.0, 15.0)
    )


def test_some_timeouts_are_changed():
    changed = Patience.from_environment({"GEARTRAIN_PATIENCE": "grace=0.5, stopped = 60"})
    assert changed == Patience(unwind=3.0, grace=0.5, teardown=300.0, stopped=60.0)


@pytest.mark.parametrize(
    "text",
    [
        "grace",
        "grace=",
        "grace=soon",
        "grace=0",
        "grace=-1",
        "grace=nan",
        "patience=3",
        "grace=1;unwind=2",
    ],
)
def test_an_invalid_timeout_is_refused(text):
    with pytest.raises(
        gt.UsageError,
        match=r"GEARTRAIN_PATIENCE: .* is not NAME=SECONDS. Fix: seconds above 0 for unwind, grace",
    ):
        Patience.from_environment({"GEARTRAIN_PATIENCE": f"stopped=1,{text}"})
