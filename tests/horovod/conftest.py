"""What the tests of horovod run: one program of several ranks for many cases."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from geartrain_testing.launching import launched

HERE = Path(__file__).parent
HAS = all(find_spec(name) is not None for name in ("horovod", "geartrain_horovod"))


def pytest_collection_modifyitems(items):
    """Tests marked ``horovod`` need the real one."""
    for item in items:
        if not HAS and item.get_closest_marker("horovod"):
            item.add_marker(
                pytest.mark.skip(
                    reason="Horovod is not installed; it is built in an environment of its own"
                )
            )


@pytest.fixture(scope="session", autouse=True)
def cycle_time():
    """Let Horovod's threads, which wake up a thousand times a second while ranks wait, do so a hundred times."""
    with pytest.MonkeyPatch.context() as patch:
        if "HOROVOD_CYCLE_TIME" not in os.environ:
            patch.setenv("HOROVOD_CYCLE_TIME", "10")
        yield


@pytest.fixture(scope="session")
def three_ranks(tmp_path_factory):
    """case -> what it came to, for each of three ranks; see trainings.py."""
    folder = tmp_path_factory.mktemp("cases")
    with launched(str(HERE / "trainings.py"), str(folder), folder=folder) as run:
        run.succeed(300)
        assert run.left_behind() == []
    return [torch.load(folder / f"kept-{rank}.pt", weights_only=False) for rank in range(3)]
