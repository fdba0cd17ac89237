"""What holds for all tests."""

import gc
import os
import signal
import sys

import pytest

# Before torch is imported: with more threads than cores, OpenMP's threads spin while they wait for each other, and a backward of a tiny
# model takes 17 ms instead of 0.1. The programs that tests start inherit it. A value of the user's own stays.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A job in a shell's background ignores Ctrl-C, and one under nohup ignores a hangup; so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_finish(session):
    """Leave what is imported by now out of later garbage collections. geartrain collects after each trial of a tuner, for example, and
    would look through half a million objects of the tests each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_weights_in_every_test():
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
