"""Conformance of the strategy ``horovod``, on 2 and on 4 ranks.

``scale_lr=False`` keeps the learning rate, because N ranks are compared with one process.
"""

from typing import ClassVar

import pytest

from geartrain.testing import StrategyConformance

pytest.importorskip("geartrain_horovod", reason="geartrain-horovod is not installed")
pytest.importorskip("horovod", reason="Horovod is not installed; it needs a separate environment")

#: The first test's time includes a program that runs all scenarios of its class.
pytestmark = [pytest.mark.horovod, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", autouse=True)
def cycle_time():
    """Make Horovod's threads wake up 100 times a second while ranks wait, not 1,000 times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_CYCLE_TIME", "10")
        yield


class TestHorovod(StrategyConformance):
    strategy = "horovod"
    # tests/ddp has every phase and signal, with the same supervisor
    chosen = r"^(?!.*(error_in\[(?!training_step)|SIGSEGV|SIGTERM))"
    options: ClassVar[dict[str, object]] = {"scale_lr": False}
    deadline = 120.0
    timeout = 20.0  # on a busy machine one rank may finish its imports 10 s after another


class TestHorovodOnFour(StrategyConformance):
    strategy = "horovod"
    devices = 4
    chosen = r"^(?!.*(error_in|SIGSEGV|SIGTERM|SIGSTOP|key_on_one_rank))"
    options: ClassVar[dict[str, object]] = {"scale_lr": False}
    deadline = 120.0
    timeout = 30.0
