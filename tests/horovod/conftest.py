"""Fixtures for the tests of horovod: one program of three ranks runs many cases."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from geartrain_testing.launching import launched

HERE = Path(__file__).parent
HAS = all(find_spec(name) is not None for name in ("horovod", "geartrain_horovod"))


def pytest_collection_modifyitems(items):
    """Skip tests marked ``horovod`` if Horovod is not installed."""
    skip = pytest.mark.skip(
        reason="Horovod is not installed; it is built in a separate environment"
    )
    for item in items:
        if not HAS and item.get_closest_marker("horovod"):
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def cycle_time():
    """Make Horovod's threads poll 100 times per second instead of 1,000, to save processor time."""
    with pytest.MonkeyPatch.context() as patch:
        if "HOROVOD_CYCLE_TIME" not in os.environ:
            patch.setenv("HOROVOD_CYCLE_TIME", "10")
        yield


@pytest.fixture(scope="session")
def three_ranks(tmp_path_factory):
    """Return the results of each of three ranks, by case; see trainings.py."""
    folder = tmp_path_factory.mktemp("cases")
    with launched(str(HERE / "trainings.py"), str(folder), folder=folder) as run:
        run.succeed(300)
        assert run.left_behind() == []
    return [torch.load(folder / f"kept-{rank}.pt", weights_only=False) for rank in range(3)]
