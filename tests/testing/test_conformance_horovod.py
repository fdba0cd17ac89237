"""The strategy ``horovod`` conforms, on 2 and on 4 ranks. The learning rate stays as it is: N ranks are compared with one process."""

from typing import ClassVar

import pytest

from geartrain.testing import StrategyConformance

pytest.importorskip("geartrain_horovod", reason="geartrain-horovod is not installed")
pytest.importorskip("horovod", reason="Horovod is not installed; it is built in an environment of its own")

#: One program runs all scenarios of a class, on the time of the first test that asks for one.
pytestmark = pytest.mark.timeout(900)


class TestHorovod(StrategyConformance):
    strategy = "horovod"
    options: ClassVar[dict[str, object]] = {"scale_lr": False}
    deadline = 120.0
    timeout = 20.0  # on a busy machine ranks import what optimizers need ten seconds apart


@pytest.mark.long
class TestHorovodOnFour(StrategyConformance):
    strategy = "horovod"
    devices = 4
    options: ClassVar[dict[str, object]] = {"scale_lr": False}
    deadline = 120.0
    timeout = 30.0
