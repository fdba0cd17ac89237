"""The strategy ``horovod`` conforms, on 2 and on 4 ranks. The learning rate stays as it is: N ranks are compared with one process."""

from typing import ClassVar

import pytest

from geartrain.testing import StrategyConformance

pytest.importorskip("geartrain_horovod", reason="geartrain-horovod is not installed")
pytest.importorskip(
    "horovod", reason="Horovod is not installed; it is built in an environment of its own"
)

#: One program runs all scenarios of a class, on the time of the first test that asks for one.
pytestmark = [pytest.mark.horovod, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", autouse=True)
def cycle_time():
    """Let Horovod's threads, which wake up a thousand times a second while ranks wait, do so a hundred times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_CYCLE_TIME", "10")
        yield


class TestHorovod(StrategyConformance):
    strategy = "horovod"
    chosen = r"^(?!.*(error_in\[(?!training_step)|SIGSEGV|SIGTERM))"  # tests/ddp has every phase and signal under the same supervisor
    options: ClassVar[dict[str, object]] = {"scale_lr": False}
    deadline = 120.0
    timeout = 20.0  # on a busy machine ranks import what optimizers need ten seconds apart


class TestHorovodOnFour(StrategyConformance):
    strategy = "horovod"
    devices = 4
    chosen = r"^(?!.*(error_in|SIGSEGV|SIGTERM|SIGSTOP|key_on_one_rank))"
    options: ClassVar[dict[str, object]] = {"scale_lr": False}
    deadline = 120.0
    timeout = 30.0
