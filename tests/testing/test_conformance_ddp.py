"""The strategy ``ddp`` conforms, as it is and with its options."""

from geartrain.testing import StrategyConformance


class TestDDP(StrategyConformance):
    strategy = "ddp"
