"""Settings and fixtures for all tests."""

import gc
import os
import signal
import sys
from contextlib import suppress
from importlib.util import find_spec

import pytest

# Set before torch is imported: with more threads than cores, OpenMP's threads spin while they wait
# for each other, and a backward of a tiny model takes 17 ms instead of 0.1 ms. Programs that tests
# start inherit it. A value that the user has set is kept.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A background job of a shell ignores Ctrl-C, and a job under nohup ignores a hangup. The processes
# that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# No test cuts the power, and each of the thousands of calls waits milliseconds for the disk.
os.fsync = lambda number: None

with suppress(ImportError):  # the environment discovery
    from hypothesis import settings

    settings.register_profile("default", deadline=None, max_examples=40)
    settings.register_profile("full", deadline=None, max_examples=250)
    settings.load_profile("default")


def pytest_collection_finish(session):
    """Exclude all objects that exist now from later garbage collections.

    geartrain collects garbage after each trial of a tuner, for example. Each collection would
    inspect half a million objects of the tests.
    """
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    """Skip a test whose marker is a library that is not installed.

    ``importorskip`` in its file would import the library in each process that collects tests.
    """
    for library in ("deepspeed", "horovod", "tpu"):
        package = "torch_tpu" if library == "tpu" else library
        if item.get_closest_marker(library) and find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


@pytest.fixture(autouse=True)
def _same_weights_in_every_test():
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
