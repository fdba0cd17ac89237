"""What every strategy must do, from geartrain's conformance kit."""

from geartrain.testing import StrategyConformance


class TestMine(StrategyConformance):
    strategy = "mine"
