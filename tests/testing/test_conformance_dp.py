"""The strategies ``dp`` and ``ddp2`` conform."""

from geartrain.testing import StrategyConformance


class TestDP(StrategyConformance):
    strategy = "dp"


class TestDDP2(StrategyConformance):
    strategy = "ddp2"
