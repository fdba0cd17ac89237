"""The strategy ``ddp_spawn`` conforms, by every start method."""

from typing import ClassVar

from geartrain.testing import StrategyConformance


class TestForkserver(StrategyConformance):
    strategy = "ddp_spawn"


class TestSpawn(StrategyConformance):
    strategy = "spawn"
    options: ClassVar[dict[str, object]] = {"start_method": "spawn"}


class TestFork(StrategyConformance):
    strategy = "ddp_spawn"
    options: ClassVar[dict[str, object]] = {"start_method": "fork"}
