"""The strategy ``ddp_spawn`` conforms; by every start method in what a start method can change."""

from typing import ClassVar

from geartrain.testing import StrategyConformance

#: How work gets to processes and back, how they end, and what stays; not what ranks compute once they are there. A process that is
#: started on its own pays seconds for importing torch, in each of two ranks and in each fit.
STARTED = (
    r"\[(sgd|fit_twice)\]|evaluation_coverage|fit_validate_test|caller|plugins|metadata|_left|one_device|multi_node|loopback_only"
    r"|error_in\[(setup|training_step)\]|signal\[SIG(KILL|STOP)\]"
)


class TestForkserver(StrategyConformance):
    strategy = "ddp_spawn"


class TestSpawn(StrategyConformance):
    strategy = "spawn"
    options: ClassVar[dict[str, object]] = {"start_method": "spawn"}
    chosen = STARTED


class TestFork(StrategyConformance):
    strategy = "ddp_spawn"
    options: ClassVar[dict[str, object]] = {"start_method": "fork"}
    chosen = STARTED
