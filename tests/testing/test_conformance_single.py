"""The strategy ``single`` conforms."""

from geartrain.testing import StrategyConformance


class TestSingle(StrategyConformance):
    strategy = "single"
    devices = 1
