"""Results of programs that several test files read."""

import pytest

from . import weights_ranks
from .programs import DEADLINE, Programs


def pytest_collection_modifyitems(items):
    # The first test runs the program, or waits for the worker that runs it.
    for item in items:
        if "kept" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(DEADLINE + 60))


@pytest.fixture(scope="session", autouse=True)
def programs(request, tmp_path_factory):
    """The programs of the chosen tests; the test modules list the parts in PROGRAMS."""
    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):  # a worker of xdist: the folder above is the run's
        folder = folder.parent
    modules = dict.fromkeys(
        item.module for item in request.session.items if "kept" in getattr(item, "fixturenames", ())
    )
    made = Programs(
        folder / "bagua", [name for module in modules for name in getattr(module, "PROGRAMS", ())]
    )
    weights_ranks.programs.append(made)
    return made


@pytest.fixture
def kept(programs):
    """``kept("qadam")``: the results that each of two ranks saved in qadam_program.py."""
    return programs.kept
