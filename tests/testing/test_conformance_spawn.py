"""The strategy ``ddp_spawn`` conforms; by every start method in what a start method can change."""

from typing import ClassVar

import pytest

from geartrain.testing import StrategyConformance

pytestmark = pytest.mark.timeout(300)

#: How work gets to processes and back, how they end, and what stays; not what ranks compute once they are there. A process that is
#: started on its own pays seconds for importing torch, in each of two ranks and in each fit.
STARTED = (
    r"\[(sgd|fit_twice)\]|evaluation_coverage|fit_validate_test|caller|plugins|metadata|_left|one_device|multi_node|loopback_only"
    r"|error_in\[(setup|training_step)\]|signal\[SIG(KILL|STOP)\]"
)


class TestForkserver(StrategyConformance):
    strategy = "ddp_spawn"
    matrix = r"^(?!test_(equals_one_process\[sgd\]|caller|metadata|\w+_left$))"


@pytest.mark.matrix
class TestSpawn(StrategyConformance):
    strategy = "spawn"
    options: ClassVar[dict[str, object]] = {"start_method": "spawn"}
    chosen = STARTED


@pytest.mark.matrix
class TestFork(StrategyConformance):
    strategy = "ddp_spawn"
    options: ClassVar[dict[str, object]] = {"start_method": "fork"}
    chosen = STARTED
