"""The strategy ``ddp_spawn`` conforms."""

from geartrain.testing import StrategyConformance


class TestDDPSpawn(StrategyConformance):
    strategy = "ddp_spawn"
